"""One member of `lachesis bench publish`: the real weight client and receiver around an engine that only copies.

Run as a program: python -m lachesis_bench.publish_member FOLDER NAME. It obeys JSON lines on stdin and answers with
JSON lines on stdout; times are CLOCK_MONOTONIC, which all processes of a machine share.

- follow {address}: serves what the publisher there publishes, until the next `follow`; an `active` line a version.
- served {}: answers the checksum of what is served.
- meet {group} or meet {address}: opens a plain gloo group, or a plain ZeroMQ socket, for `raw`.
- raw {bytes, copy}: says `ready`, receives that many bytes over it, and copies them over the served weights if asked.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import trio
import zmq

from lachesis_actors.weight_client import follow_weights
from lachesis_actors.weight_receiver import Receiver
from lachesis_configs.schema import Config, Weights
from lachesis_transport.weights.checksum import mirror_checksum
from lachesis_transport.weights.collective import Group, GroupSpec
from lachesis_transport.weights.mirror import Mirror

DEADLINE_SECONDS = 60.0


class TimedMirror(Mirror):
    """A mirror that notes when a payload is there, when it is applied and when it is verified."""

    arrived = applied = staged = 0.0

    def apply(self, *args: Any, **kwargs: Any) -> int:
        """As Mirror.apply."""
        self.arrived = time.monotonic()
        changed = super().apply(*args, **kwargs)
        self.applied = time.monotonic()
        return changed

    def checksum(self, *, shards: int) -> str:
        """As Mirror.checksum."""
        checksum = super().checksum(shards=shards)
        self.staged = time.monotonic()
        return checksum


class HostModel:
    """An engine whose model is a copy of the mirror; obeys what activation calls."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.served = mirror.bits.copy()
        self.copy_seconds = 0.0
        self._receiver: Receiver | None = None
        self._label = "default"

    async def initialize_weights(self, info: dict[str, Any]) -> None:
        """Start the receiver thread."""
        self._receiver = Receiver(self.mirror, worker=0, **info)
        self._receiver.start()

    async def pause(self, *, clear_cache: bool) -> None:
        """Nothing generates."""

    async def resume(self) -> None:
        """Nothing generates."""

    async def update_weights(self, version: int) -> None:
        """Copy all weights, which is also the limit that staging is compared to."""
        assert self._receiver is not None
        with self._receiver.lock:
            assert self._receiver.version == version
            began = time.monotonic()
            np.copyto(self.served, self.mirror.bits)
            self.copy_seconds = time.monotonic() - began
        self._label = str(version)

    async def label(self, version: int) -> None:
        """Name what is served."""
        self._label = str(version)

    async def current_label(self) -> str:
        """The name."""
        return self._label

    def stop(self) -> None:
        """End the receiver thread."""
        if self._receiver is not None:
            self._receiver.stop()
            self._receiver = None


class Member:
    """What the program does with each command."""

    def __init__(self, folder: Path, name: str, nursery: trio.Nursery) -> None:
        self._name = name
        self._nursery = nursery
        mirror = TimedMirror.load(folder)
        assert isinstance(mirror, TimedMirror)
        self._mirror = mirror
        self._model = HostModel(self._mirror)
        self._following = trio.CancelScope()
        self._ended = trio.Event()
        self._ended.set()
        self._raw: Group | zmq.Socket | None = None

    async def obey(self, command: dict[str, Any]) -> None:
        """Carry out one command."""
        op = command.pop("op")
        if op == "follow":
            self._following.cancel()
            await self._ended.wait()
            gc.collect()  # buffers of all weights' size may wait for it
            self._following, self._ended = trio.CancelScope(), trio.Event()
            self._nursery.start_soon(self._follow, command["address"])
        elif op == "served":
            say("served", checksum=mirror_checksum(self._mirror.layout, self._model.served, shards=1))
        elif op == "meet":
            await trio.to_thread.run_sync(lambda: self._meet(**command))
            say("met")
        elif op == "raw":
            await trio.to_thread.run_sync(lambda: self._receive(**command))
        else:
            raise ValueError(f"op: {op!r}, expected follow, served, meet or raw")

    async def _follow(self, address: str) -> None:
        config = Config(weights=Weights(address=address, deadline_seconds=DEADLINE_SECONDS))
        try:
            with self._following:
                await follow_weights(
                    config=config, actor=self._name, engine=self._model, report=self._report, on_active=lambda _: None
                )
        finally:
            self._model.stop()
            self._ended.set()

    def _report(self, kind: str, **fields: Any) -> None:
        if kind != "activation":
            say("trouble", event=kind, **fields)
            return
        say(
            "active",
            version=fields["version"],
            checksum=fields["checksum"],
            arrived=self._mirror.arrived,
            applied=self._mirror.applied,
            staged=self._mirror.staged,
            active=time.monotonic(),
            copy_seconds=self._model.copy_seconds,
        )

    def _meet(self, group: dict[str, Any] | None = None, address: str | None = None) -> None:
        if isinstance(self._raw, Group | zmq.Socket):
            self._raw.close()
        if group is not None:
            self._raw = Group(GroupSpec.from_wire(group), seconds=DEADLINE_SECONDS)
        else:
            assert address is not None
            self._raw = zmq.Context.instance().socket(zmq.DEALER)
            self._raw.setsockopt(zmq.LINGER, 0)
            self._raw.setsockopt(zmq.RCVTIMEO, int(1e3 * DEADLINE_SECONDS))
            self._raw.connect(address)
            self._raw.send(b"")

    def _receive(self, *, bytes: int, copy: bool) -> None:
        if isinstance(self._raw, Group):
            buffer = np.empty(bytes, np.uint8)
            buffer[::4096] = 0  # the memory's first touch is no part of a copy
            say("ready")
            self._raw.broadcast(buffer, seconds=DEADLINE_SECONDS)
        else:
            assert self._raw is not None
            say("ready")
            buffer = np.frombuffer(self._raw.recv(copy=False).buffer, np.uint8)
        if copy:
            np.copyto(self._model.served, buffer.view(np.uint16))
        say("raw", time=time.monotonic())


def say(kind: str, **fields: Any) -> None:
    """One line on stdout."""
    sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


async def main(folder: str, name: str) -> None:
    """Obey until stdin ends."""
    async with trio.open_nursery() as nursery:
        member = Member(Path(folder), name, nursery)
        say("started")
        pending = b""
        async for piece in trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())):
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                await member.obey(json.loads(line))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
