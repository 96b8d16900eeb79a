"""A publisher with members, in this process and in others, for tests of publication."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import trio
from member_process import CopyingEngine, member_config
from model import Learner

from lachesis_actors.weight_client import follow_weights
from lachesis_learner.publisher import Publisher
from lachesis_transport.keys import Keys
from lachesis_transport.weights.log_files import LogFiles
from lachesis_transport.weights.mirror import Mirror

MEMBER = Path(__file__).with_name("member_process.py")


@asynccontextmanager
async def serving(
    learner: Learner,
    *,
    channel: str = "collective",
    deadline: float = 10.0,
    address: str = "tcp://127.0.0.1:0",
    keys: Keys | None = None,
    trusted_network: bool = False,
    files: LogFiles | None = None,
) -> AsyncIterator[Publisher]:
    publisher = Publisher(
        address=address,
        keys=keys,
        trusted_network=trusted_network,
        layout=learner.layout,
        channel=channel,  # type: ignore[arg-type]
        deadline_seconds=deadline,
        files=files,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(publisher.serve)
        yield publisher
        nursery.cancel_scope.cancel()


class Member:
    """A weight client in this process."""

    def __init__(
        self,
        publisher: Publisher,
        folder: Path,
        *,
        name: str,
        workers: int,
        deadline: float,
        channel: Literal["auto", "stream"] = "auto",
    ) -> None:
        self.engine = CopyingEngine(folder, workers=workers)
        self.events: list[dict[str, Any]] = []
        self.active: list[int] = []
        self.follow = partial(
            follow_weights,
            config=member_config(publisher.address, workers=workers, deadline=deadline, channel=channel),
            actor=name,
            engine=self.engine,
            report=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            on_active=self.active.append,
        )

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def assert_serves(self, learner: Learner) -> None:
        for bits in self.engine.served:
            mirror = Mirror(learner.layout)
            mirror.bits[:] = bits
            for name, tensor in mirror.tensors():
                assert torch.equal(tensor.view(torch.int16), learner.tensors[name].view(-1).view(torch.int16)), name


@asynccontextmanager
async def joined(
    publisher: Publisher,
    folder: Path,
    *,
    name: str = "actor-0",
    workers: int = 1,
    deadline: float = 10.0,
    channel: Literal["auto", "stream"] = "auto",
) -> AsyncIterator[Member]:
    member = Member(publisher, folder, name=name, workers=workers, deadline=deadline, channel=channel)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(member.follow)
            await until(lambda: name in publisher.members)
            yield member
            nursery.cancel_scope.cancel()
    finally:
        member.engine.stop()


async def until(condition: Callable[[], bool], *, seconds: float = 15.0) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.01)


def free(address: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        except OSError:
            return False
        return True


class Process:
    """A program that prints one JSON map a line: `events`. Ends with the block."""

    def __init__(self, program: Path, *arguments: object) -> None:
        self.events: list[dict[str, Any]] = []
        self.popen = subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def active(self) -> list[int]:
        return [event["version"] for event in self.of("active")]

    def tell(self, **command: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(command).encode() + b"\n")
        self.popen.stdin.flush()

    async def read(self) -> None:
        assert self.popen.stdout is not None
        stream = trio.lowlevel.FdStream(os.dup(self.popen.stdout.fileno()))
        buffer = b""
        async for piece in stream:
            buffer += piece
            *lines, buffer = buffer.split(b"\n")
            self.events.extend(json.loads(line) for line in lines)


@asynccontextmanager
async def running(program: Path, *arguments: object) -> AsyncIterator[Process]:
    process = Process(program, *arguments)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.read)
            yield process
            nursery.cancel_scope.cancel()
    finally:
        process.popen.kill()
        process.popen.wait()


def actor(
    address: str,
    folder: Path,
    *,
    name: str,
    deadline: float,
    workers: int = 1,
    strike: str = "never",
    keys: Path | None = None,
    trusted_network: bool = False,
) -> Any:
    """An actor without vLLM in a process of its own; `strike` says when it sends itself a signal (member_process)."""
    config = member_config(address, workers=workers, deadline=deadline, keys=keys, trusted_network=trusted_network)
    return running(MEMBER, config.model_dump_json(), name, folder, strike)


@asynccontextmanager
async def joined_after_first(
    publisher: Publisher, learner: Learner, folder: Path, deadline: float
) -> AsyncIterator[Member]:
    """Publish version 0 and let one member in."""
    await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
    async with joined(publisher, folder, deadline=deadline) as member:
        yield member
