"""What plain weights, which could be patched in place, cost a real vLLM server on a CPU: tokens/s and memory.

Two servers of SmolLM2-135M, one with the packed copies that vLLM makes of its linear weights and one without, serve the
load of `lachesis bench activation` in turns; the other one is idle meanwhile.

    .venv/bin/python -m lachesis_bench.activation_served      # the figures, one JSON line each
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import trio

from lachesis_actors.engine import Engine, open_engine
from lachesis_bench.activation_load import REQUESTS, open_load
from lachesis_bench.figures import Figure
from lachesis_configs.models import resolve_model
from lachesis_configs.schema import Engine as EngineConfig

MODEL = "smollm2-135m-instruct"
ROUNDS = 5
TOKENS = 60 * REQUESTS
"""That a server makes in its turn; the first quarter is not timed."""

SERVERS: dict[str, dict[str, str | int | float | bool]] = {
    "packed": {},
    "plain": {"worker-extension-cls": "lachesis_bench.plain_weights.PlainWeights"},
}


def plain_served() -> list[Figure]:
    """publish.plain_speed and publish.plain_memory."""
    speeds, memory = trio.run(_measure)
    plain, packed = (statistics.median(speeds[name]) for name in ("plain", "packed"))
    return [
        Figure(
            figure="publish.plain_speed",
            value=plain,
            unit="tokens/s",
            against="a server with packed weights, in turns",
            reference=packed,
            ratio=plain / packed,
            runs=ROUNDS,
        ),
        Figure(
            figure="publish.plain_memory",
            value=memory["plain"],
            unit="MB",
            against="the processes of a server with packed weights",
            reference=memory["packed"],
            ratio=memory["plain"] / memory["packed"],
            runs=1,
        ),
    ]


async def _measure() -> tuple[dict[str, list[float]], dict[str, float]]:
    folder = await trio.to_thread.run_sync(resolve_model, MODEL)
    speeds: dict[str, list[float]] = {name: [] for name in SERVERS}
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as logs:
        async with AsyncExitStack() as stack:
            engines: dict[str, Engine] = {}
            for name, arguments in SERVERS.items():
                before = _children_mb()
                config = EngineConfig(max_model_len=512, max_num_seqs=REQUESTS, arguments=arguments)
                log = Path(logs) / f"{name}.log"
                engines[name] = await stack.enter_async_context(
                    open_engine(config, model_path=folder, log_path=log, seed=0, kv="recompute")
                )
                await _speed(engines[name])
                memory[name] = _children_mb() - before
            for _ in range(ROUNDS):
                for name, engine in engines.items():
                    speeds[name].append(await _speed(engine))
    return speeds, memory


async def _speed(engine: Engine) -> float:
    async with open_load(engine) as load:
        await load.tokens(TOKENS // 4)
        began = time.perf_counter()
        return await load.tokens(TOKENS) / (time.perf_counter() - began)


def _children_mb() -> float:
    """Memory that the processes below this one hold for themselves, in MB."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


if __name__ == "__main__":
    for figure in plain_served():
        print(figure.to_json(), flush=True)
