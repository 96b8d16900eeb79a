"""The learner's input and output: the queue's client and the publisher, in one trio thread beside the main thread.

The main thread is ordinary blocking code. It submits a coroutine function and gets a future; what fails in a request is
raised by its future, and when the thread itself ends (the publisher crashed, say) every future raises that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import trio

from lachesis_configs.schema import Weights
from lachesis_learner.publisher import Publisher, PublishReport
from lachesis_transport.client import QueueError
from lachesis_transport.consumer import Consumer, open_consumer
from lachesis_transport.keys import Keys
from lachesis_transport.weights.layout import Layout
from lachesis_transport.weights.log_files import LogFiles
from lachesis_transport.weights.version_log import Kept

logger = logging.getLogger("lachesis.learner")

T = TypeVar("T")

CLOSE_SECONDS = 10.0


class ExchangeEnded(RuntimeError):
    """The input and output of the learner ended; the cause is chained."""


def refusal(error: ExchangeEnded) -> QueueError | None:
    """The queue's refusal that ended the input and output: another learner took over, say."""
    cause: BaseException | None = error.__cause__
    while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]
    return cause if isinstance(cause, QueueError) else None


class TrioThread:
    """A thread that runs coroutines for others."""

    def __init__(self, name: str) -> None:
        self._futures: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._ended = False
        self._cause: BaseException | None = None
        self._nursery: trio.Nursery
        self._token: trio.lowlevel.TrioToken
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    def submit(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> Future[T]:
        """Run `await function(*arguments)` in the thread; its result or exception arrives in the future."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(self._ending())
                return future
            self._futures.add(future)
        self._token.run_sync_soon(self._nursery.start_soon, self._settle, future, function, arguments)
        return future

    async def start(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Inside the thread: start a background task that ends with the thread; what it raises ends the thread."""
        return await self._nursery.start(function, *arguments)

    def close(self) -> None:
        """Cancel everything and end the thread."""
        try:
            self._token.run_sync_soon(self._nursery.cancel_scope.cancel)
        except trio.RunFinishedError:
            pass
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # the main thread raises it, from the next future
            self._cause = error
        with self._lock:
            self._ended = True
            left = list(self._futures)
            self._futures.clear()
        for future in left:
            future.set_exception(self._ending())

    async def _serve(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()
            self._started.set()
            await trio.sleep_forever()

    async def _settle(self, future: Future[Any], function: Callable[..., Awaitable[Any]], arguments: Any) -> None:
        try:
            result = await function(*arguments)
        except trio.Cancelled:
            raise
        except Exception as error:
            if self._pop(future):
                future.set_exception(error)
        else:
            if self._pop(future):
                future.set_result(result)

    def _pop(self, future: Future[Any]) -> bool:
        with self._lock:
            if future not in self._futures:
                return False
            self._futures.remove(future)
            return True

    def _ending(self) -> ExchangeEnded:
        ended = ExchangeEnded(f"input and output ended: {self._cause or 'closed'}")
        ended.__cause__ = self._cause
        return ended


class Exchange(TrioThread):
    """Queue client and publisher of rank 0. Every method returns a future."""

    def __init__(self, address: str, *, keys: Keys | None = None) -> None:
        super().__init__("exchange")
        self._address = address
        self._keys = keys
        self._leave = trio.Event()
        self._left = trio.Event()
        self.consumer: Consumer
        """Once `connect` has a result."""
        self.publisher: Publisher
        """Once `open_publisher` has a result."""

    def connect(self) -> Future[None]:
        """Say hello to the queue, however long it takes to come."""
        return self.submit(self._connect)

    def open_publisher(
        self, weights: Weights, layout: Layout, *, device: str, files: LogFiles, kept: Kept | None
    ) -> Future[None]:
        """Let actors join from now on. Versions are kept in `files`, which held `kept`.

        Reports what they held as an event of kind `weights_restored`.
        """
        return self.submit(partial(self._open_publisher, weights, layout, device=device, files=files, kept=kept))

    def publish(self, *, version: int, parent: int | None, blobs: Sequence[bytes]) -> Future[PublishReport]:
        """Publish a version; the result comes when every healthy member has it, or the deadline passed.

        The queue learns of the version before any member does, and the report afterwards as an event of kind
        `publication`.
        """
        return self.submit(partial(self._publish, version=version, parent=parent, blobs=blobs))

    def leave(self) -> Future[None]:
        """Say goodbye to the queue: what is leased goes back."""
        return self.submit(self._say_goodbye)

    async def _connect(self) -> None:
        self.consumer = await self.start(self._hold_consumer)

    async def _hold_consumer(self, *, task_status: trio.TaskStatus[Consumer] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_consumer(self._address, name="learner", incarnation=uuid4().hex, keys=self._keys) as consumer:
            task_status.started(consumer)
            await self._leave.wait()
        self._left.set()

    async def _say_goodbye(self) -> None:
        self._leave.set()
        await self._left.wait()

    async def _open_publisher(
        self, weights: Weights, layout: Layout, *, device: str, files: LogFiles, kept: Kept | None
    ) -> None:
        self.publisher = Publisher(
            address=weights.address,
            layout=layout,
            channel=weights.channel,
            deadline_seconds=weights.deadline_seconds,
            device="cpu" if device == "cpu" else "cuda:0",  # a rank sees one GPU alone
            keys=self._keys,
            trusted_network=weights.trusted_network,
            files=files,
            kept=kept,
        )
        await self.start(self.publisher.serve)
        self.consumer.report(
            "weights_restored", version=None if kept is None else kept.newest.version, damaged=files.damaged
        )

    async def _publish(self, *, version: int, parent: int | None, blobs: Sequence[bytes]) -> PublishReport:
        await self.consumer.published(version)
        report = await self.publisher.publish(version=version, parent=parent, blobs=blobs)
        for actor, reason in report.removed.items():
            logger.warning("version %d: actor %s was removed: %s", version, actor, reason)
        self.consumer.report(
            "publication",
            version=version,
            bytes=report.bytes,
            full_bytes=report.full_bytes,
            seconds=report.seconds,
            members=list(report.members),
            removed=report.removed,
            channel=report.channel,
            checksum=report.checksum,
            unkept=report.unkept,
            messages_refused=report.messages_refused,
        )
        return report
