"""What a new version costs an engine that is busy: a real vLLM server with SmolLM2-135M and a steady load of requests.

Three ways take turns on one server: what Lachesis does by default (the version is prepared beside the generation and
swapped in, running requests are prefilled again), the same with `activation.kv: keep`, and vLLM's full reload of all
weights inside the pause, which is the limit that the others are compared with.

- publish.pause: the longest time between two tokens of a running request, the new prefill included.
- publish.standstill: from the call of pause to the end of resume.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import trio
from safetensors.torch import load_file

from lachesis_actors.engine import Engine, open_engine
from lachesis_actors.weight_receiver import CHUNK_BYTES
from lachesis_actors.weight_workers import Workers, open_workers
from lachesis_bench.figures import Figure, Length
from lachesis_configs.models import resolve_model
from lachesis_configs.schema import Engine as EngineConfig
from lachesis_learner.shards import Shard, ShardBlob, ShardEncoder
from lachesis_transport.weights.checksum import combine

MODEL = "smollm2-135m-instruct"
SEQUENCES = 16
PROMPT_TOKENS = 64
ANSWER_TOKENS = 192
SHARE = 0.02
"""Of the weights that a version changes: a step at a learning rate of 1e-6."""

ROUNDS: dict[Length, int] = {"short": 2, "normal": 5, "long": 15}
BETWEEN_TOKENS = 24
"""Tokens of each running request between two activations."""

WAYS = {"reload": "a full reload of the weights in the pause", "recompute": "", "keep": ""}


def run(length: Length) -> list[Figure]:
    """publish.pause and publish.standstill, each also with _keep; publish.prepare, its _speed and its _memory."""
    return list(_figures(trio.run(_measure, ROUNDS[length])))


@dataclass(slots=True)
class _Measured:
    weights_mb: float
    pause: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    standstill: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    prepare: list[float] = field(default_factory=list)
    prepare_tokens: list[int] = field(default_factory=list)
    """That one request got while a version was prepared."""
    speed: list[float] = field(default_factory=list)
    """Tokens/s of one request before."""
    memory: list[float] = field(default_factory=list)
    """MB that the engine's processes grow by while a version is prepared."""


def _figures(measured: _Measured) -> Iterator[Figure]:
    against = WAYS["reload"]
    for name, values, way in (
        ("publish.pause", measured.pause, "recompute"),
        ("publish.pause_keep", measured.pause, "keep"),
        ("publish.standstill", measured.standstill, "recompute"),
        ("publish.standstill_keep", measured.standstill, "keep"),
    ):
        yield _figure(name, values[way], "s", against=against, reference=values["reload"])
    yield _figure("publish.prepare", measured.prepare, "s")
    yield Figure(
        figure="publish.prepare_speed",
        value=sum(measured.prepare_tokens) / sum(measured.prepare),
        unit="tokens/s",
        against="the same request while nothing is prepared",
        reference=statistics.median(measured.speed),
        ratio=sum(measured.prepare_tokens) / sum(measured.prepare) / statistics.median(measured.speed),
        runs=len(measured.prepare),
    )
    yield _figure(
        "publish.prepare_memory", measured.memory, "MB", against="the bf16 weights", reference=[measured.weights_mb]
    )


def _figure(
    name: str, values: list[float], unit: str, *, against: str | None = None, reference: list[float] | None = None
) -> Figure:
    value = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (value, value, value)
    limit = statistics.median(reference) if reference else None
    return Figure(
        figure=name,
        value=value,
        unit=unit,
        against=against,
        reference=limit,
        ratio=value / limit if limit else None,
        runs=len(values),
        spread=(high - low) / 2 / value if len(values) > 1 and value else None,
    )


async def _measure(rounds: int) -> _Measured:
    folder = await trio.to_thread.run_sync(resolve_model, MODEL)
    config = EngineConfig(max_model_len=512, max_num_seqs=SEQUENCES)
    with tempfile.TemporaryDirectory() as logs:
        async with (
            open_engine(config, model_path=folder, log_path=Path(logs) / "vllm.log", seed=0, kv="keep") as engine,
            open_workers(engine, count=1) as workers,
        ):
            versions = _Versions(folder, workers)
            await versions.know()
            measured = _Measured(weights_mb=versions.encoder.layout.total * 2 / 1e6)
            async with _load(engine) as load:
                for _ in range(rounds):
                    for way in WAYS:
                        await load.tokens(BETWEEN_TOKENS)
                        await versions.stage()
                        await _activate(engine, workers, versions.version, way, load, measured)
            return measured


async def _activate(engine: Engine, workers: Workers, version: int, way: str, load: _Load, measured: _Measured) -> None:
    speed = await load.speed(BETWEEN_TOKENS)
    memory = _resident_mb()
    if way != "reload":
        began, tokens = time.perf_counter(), load.times
        before = len(tokens)
        for answer in (await workers.command("prepare", version=version)).values():
            assert answer["ok"], answer
        seconds = time.perf_counter() - began
        measured.prepare.append(seconds)
        measured.prepare_tokens.append(len(tokens) - before)
        measured.speed.append(speed)
        measured.memory.append(_resident_mb() - memory)
    began = time.perf_counter()
    await engine.pause(clear_cache=way != "keep")
    await engine.update_weights(version)
    assert await engine.current_label() == str(version)
    await engine.resume()
    measured.standstill[way].append(time.perf_counter() - began)
    await load.tokens(2)
    times = [t for t in load.times if t > began]
    earlier = [t for t in load.times if t <= began]
    # The last token before the pause may be one of the step that the pause waited for.
    gaps = np.diff([earlier[-1], *times])
    measured.pause[way].append(float(gaps.max()))


class _Versions:
    """A learner of one rank that stages its steps in the engine's workers."""

    def __init__(self, folder: Path, workers: Workers) -> None:
        self._workers = workers
        self._random = np.random.default_rng(0)
        tensors = load_file(folder / "model.safetensors")
        names = set(workers.layout.names)
        self._live = {name: tensor.view(-1) for name, tensor in tensors.items() if name in names}
        shards = [Shard(name=n, flat=t, start=0, numel=t.numel()) for n, t in self._live.items()]
        self.encoder = ShardEncoder(shards, rank=0, ranks=1)
        self.encoder.encode(anchor=True)
        self.version = 0

    async def know(self) -> None:
        """The workers hold what was loaded, as version 0."""
        await self._workers.command("know", version=0)

    async def stage(self) -> None:
        """One more version in all mirrors."""
        for tensor in self._live.values():
            bits = tensor.view(torch.int16).numpy()
            at = self._random.integers(len(bits), size=max(1, int(SHARE * len(bits))))
            bits[at] ^= 1
        blob = ShardBlob.from_wire(self.encoder.encode().to_wire())
        payload = memoryview(blob.payload)
        self.version += 1
        step: dict[str, Any] = {
            "version": self.version,
            "parent": self.version - 1,
            "checksum": combine(self.encoder.layout, [blob.checksums]),
            "sizes": [len(payload)],
            "shards": 1,
        }
        await self._workers.command("begin", **step)
        for offset in range(0, len(payload), CHUNK_BYTES):
            await self._workers.command("chunk", offset=offset, frame=payload[offset : offset + CHUNK_BYTES])
        for answer in (await self._workers.command("commit")).values():
            assert answer["version"] == self.version, answer


class _Load:
    """Requests that never end; the times at which one of them got a token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._came = trio.Event()

    def came(self) -> None:
        """One token more."""
        self.times.append(time.perf_counter())
        self._came.set()
        self._came = trio.Event()

    async def tokens(self, count: int) -> None:
        """Wait for so many."""
        until = len(self.times) + count
        while len(self.times) < until:
            await self._came.wait()

    async def speed(self, count: int) -> float:
        """Tokens/s of one request, over so many."""
        await self.tokens(count)
        return count / (self.times[-1] - self.times[-1 - count])


@asynccontextmanager
async def _load(engine: Engine) -> AsyncIterator[_Load]:
    load = _Load()
    random = np.random.default_rng(1)
    sampling = {"temperature": 1.0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}

    def prompt() -> list[int]:
        return [int(token) for token in random.integers(1000, 40_000, size=PROMPT_TOKENS)]

    async def ask() -> None:
        while True:
            await engine.generate(prompt(), sampling)

    async def stream() -> None:
        body = {"sampling_params": {**sampling, "max_tokens": 440, "logprobs": 0}, "stream": True}
        async with httpx.AsyncClient(base_url=engine.url, timeout=None, trust_env=False) as client:
            while True:
                asked = {**body, "token_ids": prompt()}
                async with client.stream("POST", "/inference/v1/generate", json=asked) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                            load.came()

    async with trio.open_nursery() as nursery:
        for _ in range(SEQUENCES - 1):
            nursery.start_soon(ask)
        nursery.start_soon(stream)
        await load.tokens(BETWEEN_TOKENS)
        yield load
        nursery.cancel_scope.cancel()


def _resident_mb() -> float:
    """Memory of all processes below this one, in MB."""
    import psutil

    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6
