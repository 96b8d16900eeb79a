"""What is published, kept on disk beside everything else: nobody ever waits for the disk.

    writer = LogWriter(files, log, on_release=...)
    nursery.start_soon(writer.run)
    writer.published()              # after each append to the log
    writer.folded()                 # after each fold
    await writer.close()

One version is written at a time, in a thread. While that writes an anchor it holds the log's mirror as a reader does;
so a disk that is slow or hangs loses it to the versions that come, like any reader, and starts again from a newer one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import trio

from lachesis_transport.rare_log import RareLog
from lachesis_transport.weights.log_files import LogFiles
from lachesis_transport.weights.version_log import Entry, VersionLog

logger = logging.getLogger("lachesis.publisher")

READER = "disk"
BEHIND_SECONDS = 10.0
CLOSE_SECONDS = 5.0
"""What a close grants the disk to keep the newest version."""


class LogWriter:
    """Brings the files up to what is published, as soon as may be.

    Args:
        files: what is on disk.
        log: what is published.
        on_release: called when the mirror is not read any more.
    """

    def __init__(self, files: LogFiles, log: VersionLog, *, on_release: Callable[[], None]) -> None:
        self.unkept = 0
        """Versions published since the disk last held the newest one."""
        self._files = files
        self._log = log
        self._on_release = on_release
        self._soon = trio.Event()
        self._rest = trio.Event()
        self._writing: tuple[int, float] | None = None
        """The version that is being written, and since when."""
        self._behind, self._failures = RareLog(logger), RareLog(logger)
        self._scope = trio.CancelScope(shield=True)

    def published(self) -> None:
        """There is a newer version."""
        self.unkept += 1
        self._soon.set()
        if self._writing is not None and trio.current_time() - self._writing[1] > BEHIND_SECONDS:
            version, since = self._writing
            self._behind.warning(
                "the disk is behind: version %d has been written for %.0f s, and %d versions are not kept yet",
                version,
                trio.current_time() - since,
                self.unkept,
            )

    def folded(self) -> None:
        """The log's mirror holds a newer version."""
        self._soon.set()

    async def run(self) -> None:
        """Write until closed."""
        with self._scope:
            while True:
                await self._soon.wait()
                self._soon = trio.Event()
                try:
                    while (entry := self._files.next(self._log)) is not None and await self._write(entry):
                        pass
                except OSError as error:
                    # Actors are served from memory: without the files a restart costs an anchor, no more.
                    newest = self._log.newest and self._log.newest.version
                    self._failures.warning(
                        "the disk does not take version %d (%d are not kept): %s", newest, self.unkept, error
                    )
                self._rest.set()
                self._rest = trio.Event()

    async def close(self) -> None:
        """End `run` once the newest version is on disk, or after CLOSE_SECONDS: what hangs is left alone."""
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            while self._writing is not None or self._soon.is_set():
                await self._rest.wait()
        self._scope.cancel()

    async def _write(self, entry: Entry) -> bool:
        """Keep an entry; False when that has to wait for a fold."""
        anchor = entry.parent is None
        if anchor and not self._log.pin(READER, until=math.inf):
            return False
        self._writing = entry.version, trio.current_time()
        try:
            kept = await trio.to_thread.run_sync(
                lambda: self._files.write(entry, self._log.mirror, held=lambda: self._log.pinned(READER)),
                abandon_on_cancel=True,
            )
        finally:
            self._writing = None
            if anchor:
                self._log.release(READER)
                self._on_release()
        if not kept:
            self._behind.warning("the disk is behind: version %d was given up for a newer one", entry.version)
        if self._log.newest is not None and self._files.head == self._log.newest.version:
            self.unkept = 0
        return True
