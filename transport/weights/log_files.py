"""The version log on disk: what lets a learner that comes back publish a delta to what its actors hold.

    RUN/weights/
        00000040.anchor     all weights at version 40
        00000041.delta      the exact difference of version 41 to the one before; and so on

A file is written under a hidden name, synced and then renamed, and carries checksums of its header and of its content:
a crash may lose the newest versions and never leaves a wrong one. What is torn, damaged, unreadable, of another model
or follows from nothing is counted in `damaged`, named in the log and removed. `restore` proves the weights by the
version's own checksum.

There is one anchor, and the deltas together are never larger than the weights: before they would be, or once EVERY of
them follow the anchor, a newer anchor takes its place.

    files = LogFiles(folder, layout)
    kept = files.restore(shards=ranks)          # None: nothing to go on from
    log = VersionLog(layout, kept=kept)
    while entry := files.next(log):             # after each append and each fold
        files.write(entry, log.mirror)          # blocking
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from lachesis_transport.messages import MessageError, pack, take, unpack
from lachesis_transport.weights.codec import CodecError
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.mirror import Mirror
from lachesis_transport.weights.version_log import LIMIT, Entry, Kept, VersionLog

log = logging.getLogger("lachesis.weights")

FOLDER = "weights"
MAGIC = b"lachesis weights\n"
DIGEST_BYTES = 16
MAX_HEADER_BYTES = 1 << 20
PIECE_BYTES = 16 << 20
EVERY = 64
"""Deltas after which the anchor is renewed: applying them is what a restart takes."""


class DamagedFile(ValueError):
    """A file is not what was written; the text names it."""


class _Overtaken(Exception):
    """The mirror is not what the anchor was to hold any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file with a valid header."""

    path: Path
    entry: Entry
    """Without its payload; an anchor's sizes say no more than the number of shards."""
    start: int
    """Where the content begins."""
    size: int
    digest: bytes

    @property
    def version(self) -> int:
        return self.entry.version


class LogFiles:
    """The files of one run's version log; one process at a time.

    Args:
        folder: RUN/weights; need not exist.
        layout: of the model: files of another one are not used.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.damaged = 0
        """Files that could not be used."""
        self._folder = folder
        self._layout = layout
        self._anchor: _File | None = None
        self._deltas: list[_File] = []
        """In order; each is a delta to the one before it."""

    @property
    def head(self) -> int | None:
        """The newest version that the files can rebuild."""
        if self._anchor is None:
            return None
        return max(self._anchor.version, self._deltas[-1].version if self._deltas else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all content."""
        return sum(file.size for file in self._deltas) + (self._anchor.size if self._anchor else 0)

    def restore(self, *, shards: int) -> Kept | None:
        """What the files hold, up to the newest version that they can rebuild; None when they hold nothing of use.

        Args:
            shards: ranks of the learner that begins.

        Blocking. A file that can't be read counts as damaged; one that can't be removed stays, and the log says so.
        """
        files = self._look()
        kept = self._rebuild(files, shards=shards)
        if kept is None:
            self._anchor, self._deltas = None, []
        self._remove(file for file in files if file is not self._anchor and file not in self._deltas)
        return kept

    def forget(self) -> None:
        """Remove everything: the files are of another run."""
        files = [*self._deltas, *([self._anchor] if self._anchor else [])]
        self._anchor, self._deltas = None, []
        self._remove(files)

    def next(self, versions: VersionLog) -> Entry | None:
        """What to write now: a delta that follows what is there, or the version of the mirror as an anchor."""
        head, newest, base = self.head, versions.newest, versions.base
        if newest is None or head == newest.version:
            return None
        entry = None if head is None else versions.delta_to(head)
        if entry is not None and self._room(len(entry.payload)):
            return entry
        if base is not None and (self._anchor is None or base.version > self._anchor.version):
            return replace(base, parent=None, payload=b"")
        return None

    def write(self, entry: Entry, mirror: Mirror, *, held: Callable[[], bool] = lambda: True) -> bool:
        """Keep what `next` asked for, durably, and remove what is not needed any more. Blocking. Raises OSError.

        The mirror, of which an anchor is made, may change meanwhile when `held` says False from before that on: then
        nothing is kept, and the answer is False.
        """
        anchor = entry.parent is None
        content = mirror.bits.view("u1").data if anchor else memoryview(entry.payload)
        path = self._folder / f"{entry.version:08d}.{'anchor' if anchor else 'delta'}"
        digest = xxhash.xxh3_128_digest(content)
        header = pack(
            {
                "version": entry.version,
                "parent": entry.parent,
                "checksum": entry.checksum,
                "sizes": [0] * entry.shards if anchor else list(entry.sizes),
                "layout": self._layout.digest,
                "size": len(content),
                "digest": digest,
            }
        )
        head = b"".join([MAGIC, len(header).to_bytes(4, "little"), header, xxhash.xxh3_128_digest(header)])
        part = path.with_name(f".{path.name}.part")
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                file.write(head)
                for start in range(0, len(content), PIECE_BYTES):
                    file.write(content[start : start + PIECE_BYTES])
                    if anchor and not held():
                        raise _Overtaken
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        except _Overtaken:
            part.unlink()
            return False
        except OSError:
            part.unlink(missing_ok=True)  # a full disk shall not be kept full
            raise
        _sync(self._folder)
        written = _File(path=path, entry=replace(entry, payload=b""), start=len(head), size=len(content), digest=digest)
        unused: list[_File] = []
        if anchor:
            unused += [self._anchor] if self._anchor else []
            before = self.head
            self._anchor = written
            if before is None or before < entry.version:
                unused += self._deltas
                self._deltas = []
        else:
            self._deltas.append(written)
        self._remove([*unused, *self._surplus()])
        return True

    def _room(self, size: int) -> bool:
        """Whether one more delta fits behind the anchor."""
        assert self._anchor is not None
        after = [file.size for file in self._deltas if file.version > self._anchor.version]
        return len(after) < EVERY and sum(after) + size <= 2 * self._layout.total

    def _surplus(self) -> list[_File]:
        """Take off the oldest deltas: beyond what a version log serves, or what the bound allows."""
        assert self._anchor is not None
        surplus = []
        while (
            self._deltas
            and self._deltas[0].version <= self._anchor.version
            and (len(self._deltas) > LIMIT or sum(file.size for file in self._deltas) > 2 * self._layout.total)
        ):
            surplus.append(self._deltas.pop(0))
        return surplus

    def _look(self) -> list[_File]:
        """The files with valid headers, by version; the others are removed."""
        try:
            paths = sorted(self._folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("weights on disk: %s; not used", error)
            return []
        files = []
        for path in paths:
            if path.match(".*.part"):
                _unlink(path)
            elif path.suffix in (".anchor", ".delta"):
                try:
                    files.append(self._read_header(path))
                except DamagedFile as error:
                    self._refuse(error)
                    _unlink(path)
                except OSError as error:
                    self._refuse(_unreadable(path, error))
                    _unlink(path)
        return sorted(files, key=lambda file: file.version)

    def _rebuild(self, files: list[_File], *, shards: int) -> Kept | None:
        mirror = Mirror(self._layout)
        anchors = [file for file in reversed(files) if file.entry.parent is None]
        anchor = next((file for file in anchors if self._fill(mirror, file)), None)
        if anchor is None:
            return None
        known: dict[str, int] = {}
        entries: deque[Entry] = deque(maxlen=LIMIT)
        self._anchor, self._deltas = anchor, []
        deltas = [file for file in files if file.entry.parent is not None]
        for file in self._leading_to(anchor.version, deltas):
            entry = self._load(file)
            if entry is None:
                self._deltas.clear()
                entries.clear()
                known.clear()
                continue
            self._deltas.append(file)
            entries.append(entry)
            known[entry.checksum] = entry.version
        newest = anchor.entry
        following = {file.entry.parent: file for file in deltas}
        while True:
            known[newest.checksum] = newest.version
            if newest.shards != shards:
                known[mirror.checksum(shards=shards)] = newest.version
            following_file = following.get(newest.version)
            entry = None if following_file is None else self._load(following_file)
            if following_file is None or entry is None:
                break
            try:
                mirror.apply(entry.payload, sizes=entry.sizes)
            except CodecError as error:
                self._refuse(DamagedFile(f"{following_file.path}: {error}"))
                break
            self._deltas.append(following_file)
            entries.append(entry)
            newest = entry
        checksum = mirror.checksum(shards=newest.shards)
        if checksum != newest.checksum:
            self._refuse(
                DamagedFile(f"{self._folder}: version {newest.version}: {checksum}, expected {newest.checksum}")
            )
            return None
        return Kept(mirror=mirror, newest=newest, deltas=tuple(entries), known=known)

    def _leading_to(self, version: int, deltas: Iterable[_File]) -> list[_File]:
        """The newest deltas up to `version`, in order."""
        by_version = {file.version: file for file in deltas}
        chain: list[_File] = []
        at: int | None = version
        while at is not None and at in by_version and len(chain) < LIMIT:
            chain.insert(0, by_version[at])
            at = chain[0].entry.parent
        return chain

    def _read_header(self, path: Path) -> _File:
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + 4)
            size = int.from_bytes(start[len(MAGIC) :], "little")
            if start[: len(MAGIC)] != MAGIC or size > MAX_HEADER_BYTES:
                raise DamagedFile(f"{path}: not a file of the version log")
            packed, digest = file.read(size), file.read(DIGEST_BYTES)
        if xxhash.xxh3_128_digest(packed) != digest:
            raise DamagedFile(f"{path}: its header is damaged")
        try:
            header = unpack(packed)
            entry = Entry(
                version=take(header, "version", int),
                parent=take(header, "parent", (int, type(None))),
                checksum=take(header, "checksum", str),
                sizes=tuple(take(header, "sizes", list)),
                payload=b"",
            )
            found = _File(
                path=path,
                entry=entry,
                start=len(start) + size + DIGEST_BYTES,
                size=take(header, "size", int),
                digest=take(header, "digest", bytes),
            )
            layout = take(header, "layout", bytes)
        except MessageError as error:
            raise DamagedFile(f"{path}: {error}") from None
        if layout != self._layout.digest:
            raise DamagedFile(f"{path}: weights of another model")
        if path.stat().st_size != found.start + found.size:
            raise DamagedFile(f"{path}: {path.stat().st_size} bytes, expected {found.start + found.size}")
        return found

    def _fill(self, mirror: Mirror, file: _File) -> bool:
        """Read an anchor into the mirror; False when it is damaged."""
        target = mirror.bits.view("u1").data
        read = 0
        try:
            with file.path.open("rb", buffering=0) as source:
                source.seek(file.start)
                while read < len(target) and (count := source.readinto(target[read:])):
                    read += count
        except OSError as error:
            self._refuse(_unreadable(file.path, error))
            return False
        intact = read == file.size == len(target) and xxhash.xxh3_128_digest(target) == file.digest
        if not intact:
            self._refuse(DamagedFile(f"{file.path}: its content is damaged"))
        return intact

    def _load(self, file: _File) -> Entry | None:
        """The whole entry of a delta, or None when it is damaged."""
        try:
            with file.path.open("rb") as source:
                source.seek(file.start)
                payload = source.read(file.size)
        except OSError as error:
            self._refuse(_unreadable(file.path, error))
            return None
        if xxhash.xxh3_128_digest(payload) != file.digest:
            self._refuse(DamagedFile(f"{file.path}: its content is damaged"))
            return None
        return replace(file.entry, payload=payload)

    def _refuse(self, error: DamagedFile) -> None:
        self.damaged += 1
        log.warning("weights on disk: %s; not used", error)

    def _remove(self, files: Iterable[_File]) -> None:
        for file in files:
            _unlink(file.path)


def _unreadable(path: Path, error: OSError) -> DamagedFile:
    return DamagedFile(f"{path}: {error.strerror}")


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("weights on disk: %s; it stays", error)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
