"""The load of `lachesis bench activation`: groups of requests that never end, and when each of them got its tokens."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np
import trio

from lachesis_actors.engine import Engine

GROUPS, GROUP_SIZE = 2, 8
REQUESTS = GROUPS * GROUP_SIZE
"""That run at once."""

PROMPT_TOKENS = 64
ANSWER_TOKENS = (96, 288)
"""Shortest and longest answer."""

DEADLINE_SECONDS = 120.0


@dataclass(slots=True)
class Stream:
    """One request after another."""

    first: int = 0
    """Where in `times` the answer of the present request begins."""
    times: list[float] = field(default_factory=list)
    """When each token came (time.perf_counter)."""

    def came(self, now: float) -> None:
        """One token more."""
        self.times.append(now)

    def next_request(self) -> None:
        """The answer is complete."""
        self.first = len(self.times)

    @property
    def running(self) -> bool:
        """Whether the present request has a token."""
        return len(self.times) > self.first


class Load:
    """All streams."""

    def __init__(self, streams: int) -> None:
        self.streams = [Stream() for _ in range(streams)]
        self.count = 0
        """Tokens that came."""
        self._changed = trio.Event()

    def came(self, stream: Stream) -> None:
        """One token more."""
        stream.came(time.perf_counter())
        self.count += 1
        self._wake()

    def next_request(self, stream: Stream) -> None:
        """Its answer is complete."""
        stream.next_request()
        self._wake()

    async def tokens(self, count: int) -> int:
        """Wait until all together got that many more; returns how many came. Raises TooSlowError after two minutes."""
        before = self.count
        with trio.fail_after(DEADLINE_SECONDS):
            while self.count < before + count:
                await self._changed.wait()
        return self.count - before

    async def next_tokens(self) -> float:
        """Wait until each request that runs now has one more token; returns when the last of these came.

        Requests that end without one don't count. Raises TooSlowError after two minutes.
        """
        running = [(stream, stream.first, len(stream.times)) for stream in self.streams if stream.running]
        with trio.fail_after(DEADLINE_SECONDS):
            while any(s.first == first and len(s.times) == had for s, first, had in running):
                await self._changed.wait()
        return max(s.times[had] for s, first, had in running if s.first == first or had < s.first)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@asynccontextmanager
async def open_load(engine: Engine) -> AsyncIterator[Load]:
    """REQUESTS requests at once for the length of the block, each followed by the next; those of a group have the same
    prompt, and answers of one length, so that they stay together."""
    load = Load(REQUESTS)
    async with (
        httpx.AsyncClient(base_url=engine.url, timeout=DEADLINE_SECONDS, trust_env=False) as client,
        trio.open_nursery() as nursery,
    ):
        for i, stream in enumerate(load.streams):
            nursery.start_soon(_ask, client, load, stream, i)
        await load.tokens(REQUESTS)
        yield load
        nursery.cancel_scope.cancel()


async def _ask(client: httpx.AsyncClient, load: Load, stream: Stream, number: int) -> None:
    for turn in itertools.count():
        random = np.random.default_rng((number // GROUP_SIZE, turn))
        prompt = [int(token) for token in random.integers(1000, 40_000, size=PROMPT_TOKENS)]
        sampling = {
            "temperature": 1.0,
            "max_tokens": int(random.integers(*ANSWER_TOKENS)),
            "ignore_eos": True,
            "logprobs": 0,
        }
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
        async with client.stream("POST", "/inference/v1/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    load.came(stream)
        load.next_request(stream)
