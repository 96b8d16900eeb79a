"""The actor's side of publication: follows the publisher, stages versions in the engine's workers, activates them.

One version's way: the publisher's news come; all workers *stage* it, that is bring their mirrors to it while generation
goes on, by the collective they were invited to or else by stream; they *prepare* it, that is load it beside the
generation where the model allows; then the engine *activates* it: pause, swap, label, read the label back, resume.
Staging comes first: an actor that lags activates only the newest version.

Whatever goes wrong while staging (a broken collective, a wrong checksum, a fence, a publisher that came back as another
process) ends in `heal`: ask the publisher how to get from what the mirrors hold to the newest version, and fetch that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol

import trio

from lachesis_actors.weight_link import Fenced, Invitation, Link, StreamBroken, open_link
from lachesis_actors.weight_workers import Workers, open_workers
from lachesis_configs.addresses import host_of, on_loopback
from lachesis_configs.schema import Config
from lachesis_transport.keys import load_keys
from lachesis_transport.weights.version_log import Step

log = logging.getLogger("lachesis.weights")

MISMATCHES = 3
"""Wrong checksums in a row after which the actor gives up: its memory or its code is at fault."""

UNKNOWN = ""
"""A checksum that no version has: asks for an anchor."""


class ActivationFailed(RuntimeError):
    """The engine can no longer be trusted to serve the version that it claims; the text says what happened."""


class ServesWeights(Protocol):
    """The part of Engine that activation needs."""

    async def initialize_weights(self, info: dict[str, Any]) -> None:
        """Start the receivers."""

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop scheduling, keep requests."""

    async def resume(self) -> None:
        """Schedule again."""

    async def update_weights(self, version: int) -> None:
        """Copy the staged version and label it."""

    async def label(self, version: int) -> None:
        """Name what is loaded."""

    async def current_label(self) -> str:
        """The name of what is loaded."""


async def follow_weights(
    *,
    config: Config,
    actor: str,
    engine: ServesWeights,
    report: Callable[..., None],
    on_active: Callable[[int], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep the engine at the newest published version.

    Joins the publisher at weights.address (waits for it, logging), stages each version in the receiver threads of the
    engine's workers while generation goes on, then activates the newest: prepare, pause, update, label, read back,
    resume.

    Args:
        config: the run's.
        actor: this actor's name, the member's name at the publisher.
        engine: started, not yet labelled.
        report: called as report(kind, **fields): "activation" with version, stage_seconds, prepare_seconds,
            pause_seconds, checksum and bytes; "checksum_mismatch" with version; "healed" with version, bytes and
            reason.
        on_active: called with each version once the engine serves it and says so.

    Reports started when the engine serves a published version. Runs until cancelled; returns quietly, with the last
    version active, when the publisher says that it has finished. Raises ActivationFailed when the engine can no longer
    be trusted; the actor then ends with that cause and comes back with a fresh engine.
    """
    count = config.actor.engine.tensor_parallel
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(open_workers(engine, count=count))
        link = await stack.enter_async_context(
            open_link(
                config.weights.address,
                actor=actor,
                workers=count,
                layout=workers.layout,
                channel=config.actor.weights_channel if open_to_collectives(config) else "stream",
                keys=load_keys(config),
            )
        )
        follower = _Follower(
            link,
            workers,
            engine,
            host=host_of(config.weights.address),
            report=report,
            on_active=on_active,
            keep=config.activation.kv == "keep",
        )
        await link.join()
        while True:
            try:
                await follower.follow(task_status)
                return
            except Fenced as error:
                if not link.away:  # else one line says that it is back, and with which version
                    log.warning("%s; joining again", error)
                follower.trouble = str(error)
                await link.join()
            except StreamBroken as error:
                log.warning("%s; trying again", error)
                follower.trouble = str(error)
                await trio.sleep(0.2)


def open_to_collectives(config: Config) -> bool:
    """Whether workers may listen for the other ranks of a group, on the network that the publisher is on."""
    return config.weights.trusted_network or on_loopback(config.weights.address)


class _Follower:
    def __init__(
        self,
        link: Link,
        workers: Workers,
        engine: ServesWeights,
        *,
        host: str,
        report: Callable[..., None],
        on_active: Callable[[int], None],
        keep: bool,
    ) -> None:
        self._host = host
        self._link = link
        self._workers = workers
        self._engine = engine
        self._report = report
        self._on_active = on_active
        self._keep = keep
        self._staged: tuple[int, str] | None = None
        self._active: tuple[int, str] | None = None
        self._loaded: str | None = None
        """Checksum of what the engine loaded; None until it is known."""
        self._started = False
        self.trouble: str | None = None
        """Why the next heal is more than the ordinary way of a version."""
        self._staging_began = 0.0
        self._staging_bytes = 0
        self._mismatches = 0

    async def follow(self, task_status: trio.TaskStatus[None]) -> None:
        """Until the publisher has finished and its last version is active. Raises Fenced or StreamBroken."""
        seen: int | None = None  # after a join the publisher has to hear what is staged, even when nothing is new
        while True:
            news = await self._link.next_news(after=seen)
            self._staging_began, self._staging_bytes = trio.current_time(), 0
            if (news.version, news.checksum) != self._staged:
                invitation = self._link.take_invitation()
                if invitation is None or not await self._receive(invitation):
                    await self._heal()
            assert self._staged is not None
            await self._link.staged(*self._staged)
            if self._link.news is not None and self._link.news.version != self._staged[0]:
                continue  # a newer one came while this one was staged: activate that instead
            seen = self._staged[0]
            if self._staged != self._active:
                await self._activate(self._staged, stage_seconds=trio.current_time() - self._staging_began)
            if not self._started:
                self._started = True
                task_status.started()
            if self._link.news is not None and self._link.news.finished:
                await self._link.bye()
                log.info("the publisher has finished; version %d stays", self._staged[0])
                return

    async def _receive(self, invitation: Invitation) -> bool:
        """Take part in the collective; True when all workers hold its version."""
        if self._staged is None or self._staged[0] != invitation.parent:
            return False
        first = invitation.group["rank"]
        answers = await self._workers.command(
            "receive",
            version=invitation.version,
            parent=invitation.parent,
            checksum=invitation.checksum,
            sizes=invitation.sizes,
            seconds=invitation.seconds,
            each={
                worker: {"group": {**invitation.group, "host": self._host, "rank": first + i}}
                for i, worker in enumerate(self._workers.ranks)
            },
        )
        self._staging_bytes += sum(invitation.sizes)
        for answer in answers.values():
            if not answer["ok"]:
                log.warning("version %d by collective: %s", invitation.version, answer["error"])
                self.trouble = str(answer["error"])
        if not all(answer["ok"] for answer in answers.values()):
            return False
        if not self._verified(invitation.version, answers):
            return False
        self._staged = (invitation.version, invitation.checksum)
        return True

    async def _heal(self) -> None:
        """Bring all workers to the newest version, whatever they hold, by stream."""
        again = self.trouble is not None  # then nothing is believed that was hashed before
        while True:
            news = self._link.news
            assert news is not None
            states = await self._workers.command("state", shards=news.shards, again=again)
            again = False
            if self._loaded is None and self._active is None:
                self._loaded = next(iter(states.values()))["checksum"]
            lacking = {w: s["checksum"] for w, s in states.items() if s["checksum"] != news.checksum}
            if not lacking:
                await self._workers.command("know", version=news.version)
                self._staged = (news.version, news.checksum)
                if self.trouble is not None:
                    self._report("healed", version=news.version, bytes=self._staging_bytes, reason=self.trouble)
                    self.trouble = None
                return
            checksum = next(iter(lacking.values()))
            same = [worker for worker, theirs in lacking.items() if theirs == checksum]
            held, steps = await self._link.plan(UNKNOWN if self._mismatches else checksum)
            if held is not None:
                await self._workers.command("know", only=same, version=held)
            if not steps:
                await trio.sleep(0.05)  # the news of what these hold already are on their way
            for step in steps:
                if not await self._stream(step, same):
                    break

    async def _stream(self, step: Step, targets: list[int]) -> bool:
        """Fetch one step into these workers; True when they hold its version. Raises Fenced or StreamBroken."""
        command = self._workers.command
        began = await command(
            "begin",
            only=targets,
            version=step.version,
            parent=step.parent,
            checksum=step.checksum,
            sizes=list(step.sizes),
            shards=step.shards,
        )
        self._raise_refusal(began)

        async def sink(offset: int, piece: memoryview) -> None:
            self._raise_refusal(await command("chunk", only=targets, offset=offset, frame=piece))

        await self._link.fetch(step, sink)
        self._staging_bytes += step.bytes
        answers = await command("commit", only=targets)
        for worker, answer in answers.items():
            if not answer["ok"]:  # what can't be applied now can't be later: an anchor is asked for
                log.error("version %d: worker %d: %s", step.version, worker, answer["error"])
        return self._verified(step.version, answers)

    def _verified(self, version: int, answers: dict[int, dict[str, Any]]) -> bool:
        """Whether all results had the published checksum; counts and reports when not."""
        if all(answer["version"] == version for answer in answers.values()):
            self._mismatches = 0
            return True
        self._mismatches += 1
        self.trouble = "wrong checksum"
        self._report("checksum_mismatch", version=version)
        log.error("version %d: not the published weights after applying it; healing from an anchor", version)
        if self._mismatches >= MISMATCHES:
            raise ActivationFailed(f"version {version}: wrong checksum {MISMATCHES} times in a row")
        return False

    @staticmethod
    def _raise_refusal(answers: dict[int, dict[str, Any]]) -> None:
        for worker, answer in answers.items():
            if not answer["ok"]:
                raise StreamBroken(f"worker {worker}: {answer['error']}")

    async def _activate(self, staged: tuple[int, str], *, stage_seconds: float) -> None:
        version, checksum = staged
        same = self._loaded == checksum
        preparing = trio.current_time()
        if not same:
            answers = await self._workers.command("prepare", version=version)
            for worker, answer in answers.items():
                if not answer["ok"]:
                    raise ActivationFailed(f"version {version}: worker {worker}: {answer['error']}")
        began = trio.current_time()
        if same:
            await self._engine.label(version)
        else:
            await self._engine.pause(clear_cache=not self._keep)
            self._loaded = None
            try:
                await self._engine.update_weights(version)
            except Exception as error:
                raise ActivationFailed(f"version {version}: the engine could not load it: {error}") from error
        label = await self._engine.current_label()
        if label != str(version):
            raise ActivationFailed(f"version {version}: the engine says that it serves {label!r}")
        if self._loaded is None:
            await self._engine.resume()
        self._loaded, self._active = checksum, staged
        self._on_active(version)
        self._report(
            "activation",
            version=version,
            stage_seconds=stage_seconds,
            prepare_seconds=began - preparing,
            pause_seconds=trio.current_time() - began,
            checksum=checksum,
            bytes=self._staging_bytes,
        )
