"""What a new version costs an engine that is busy: a real vLLM server with SmolLM2-135M and a steady load of groups.

Three ways take turns on one server: what Lachesis does by default (the version is prepared beside the generation and
swapped in, running requests are prefilled again), the same with `activation.kv: keep`, and vLLM's full reload of all
weights inside the pause, after which running requests are prefilled again, too.

- publish.pause and publish.pause_keep: from the call of pause to the end of resume, as the pause of a run's summary.
- publish.pause_with_prefill: from the call of pause until the last of the running requests has its next token, so with
  the new prefill of all of them; publish.pause_keep_with_step: the same for keep, where an ordinary step follows.

Each is compared with the full reload over the same span. In the long form the other ways to update weights are
measured, too (activation_alternatives.py, activation_served.py).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from safetensors.torch import load_file

from lachesis_actors.engine import Engine, open_engine
from lachesis_actors.weight_receiver import CHUNK_BYTES
from lachesis_actors.weight_workers import Workers, open_workers
from lachesis_bench.activation_alternatives import measured_apart
from lachesis_bench.activation_load import REQUESTS, Load, open_load
from lachesis_bench.activation_served import plain_served
from lachesis_bench.figures import Figure, Length
from lachesis_configs.models import resolve_model
from lachesis_configs.schema import Engine as EngineConfig
from lachesis_learner.shards import Shard, ShardBlob, ShardEncoder
from lachesis_transport.weights.checksum import combine

MODEL = "smollm2-135m-instruct"
SHARE = 0.02
"""Of the weights that a version changes: a step at a learning rate of 1e-6."""

ROUNDS: dict[Length, int] = {"short": 2, "normal": 5, "long": 15}
BETWEEN_TOKENS = 24
"""Tokens of each running request between two activations."""

WAYS = ("reload", "recompute", "keep")


def run(length: Length) -> list[Figure]:
    """publish.pause, publish.pause_with_prefill, publish.pause_keep and publish.pause_keep_with_step; publish.prepare,
    its _speed and its _memory; in the long form also publish.repack_*, publish.patch, publish.plain_products_*,
    publish.plain_speed and publish.plain_memory."""
    figures = list(_figures(trio.run(_measure, ROUNDS[length])))
    return figures + (measured_apart() + plain_served() if length == "long" else [])


@dataclass(slots=True)
class _Measured:
    weights_mb: float
    pause: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """Seconds from the call of pause to the end of resume."""
    to_tokens: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """Seconds from the call of pause until every running request has its next token."""
    prepare: list[float] = field(default_factory=list)
    prepare_tokens: list[int] = field(default_factory=list)
    """That all requests got while a version was prepared."""
    speed: list[float] = field(default_factory=list)
    """Tokens/s of all requests before."""
    memory: list[float] = field(default_factory=list)
    """MB that the engine's processes grow by while a version is prepared."""


def _figures(measured: _Measured) -> Iterator[Figure]:
    for name, values, way, against in (
        ("publish.pause", measured.pause, "recompute", "a full reload in the pause"),
        ("publish.pause_with_prefill", measured.to_tokens, "recompute", "a full reload, and the same prefill"),
        ("publish.pause_keep", measured.pause, "keep", "a full reload in the pause"),
        ("publish.pause_keep_with_step", measured.to_tokens, "keep", "a full reload, and a prefill"),
    ):
        yield _figure(name, values[way], "s", against=against, reference=values["reload"])
    yield _figure("publish.prepare", measured.prepare, "s")
    speed = sum(measured.prepare_tokens) / sum(measured.prepare)
    yield Figure(
        figure="publish.prepare_speed",
        value=speed,
        unit="tokens/s",
        against="the same requests while nothing is prepared",
        reference=statistics.median(measured.speed),
        ratio=speed / statistics.median(measured.speed),
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
    config = EngineConfig(max_model_len=512, max_num_seqs=REQUESTS)
    with tempfile.TemporaryDirectory() as logs:
        async with (
            open_engine(config, model_path=folder, log_path=Path(logs) / "vllm.log", seed=0, kv="keep") as engine,
            open_workers(engine, count=1) as workers,
        ):
            versions = _Versions(folder, workers)
            await versions.know()
            measured = _Measured(weights_mb=versions.encoder.layout.total * 2 / 1e6)
            async with open_load(engine) as load:
                for _ in range(rounds):
                    for way in WAYS:
                        await load.tokens(BETWEEN_TOKENS * REQUESTS)
                        await versions.stage()
                        await _activate(engine, workers, versions.version, way, load, measured)
            return measured


async def _activate(engine: Engine, workers: Workers, version: int, way: str, load: Load, measured: _Measured) -> None:
    began = time.perf_counter()
    came = await load.tokens(BETWEEN_TOKENS * REQUESTS)
    speed = came / (time.perf_counter() - began)
    memory = _resident_mb()
    if way != "reload":
        began, before = time.perf_counter(), load.count
        for answer in (await workers.command("prepare", version=version)).values():
            assert answer["ok"], answer
        measured.prepare.append(time.perf_counter() - began)
        measured.prepare_tokens.append(load.count - before)
        measured.speed.append(speed)
        measured.memory.append(_resident_mb() - memory)
    began = time.perf_counter()
    await engine.pause(clear_cache=way != "keep")
    await engine.update_weights(version)
    assert await engine.current_label() == str(version)
    await engine.resume()
    measured.pause[way].append(time.perf_counter() - began)
    # The tokens of the step that the pause waited for have come by now, and the next step takes longer than this line.
    measured.to_tokens[way].append(await load.next_tokens() - began)


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
