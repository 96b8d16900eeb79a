"""What the queue costs: a durable put against SQLite itself, whole runs against plain ZeroMQ, its scaling with actors,
its memory over many groups, and what it throws away when one side is ten times slower than the other."""

from __future__ import annotations

from dataclasses import dataclass

from lachesis_bench import queue_puts, queue_runs
from lachesis_bench.figures import Figure, Length
from lachesis_bench.queue_load import Shape

LARGE = Shape(trajectories=8, tokens=2048)
KB16 = Shape(trajectories=4, tokens=240)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much is measured."""

    large_puts: int
    """Groups of 278 KB in each round of durable puts."""
    small_puts: int
    """The same of 16 KB."""
    single_puts: int
    put_rounds: int
    batches: int
    """Of each whole run."""
    runs: int
    actors: tuple[int, ...]
    scaling_batches: int
    """Of 32 groups, with several actors; one actor gets a quarter of them."""
    memory_groups: int
    waste_seconds: float


AMOUNT: dict[Length, Amount] = {
    "short": Amount(
        large_puts=200,
        small_puts=500,
        single_puts=100,
        put_rounds=3,
        batches=20,
        runs=2,
        actors=(1, 4, 16),
        scaling_batches=8,
        memory_groups=5_000,
        waste_seconds=3.0,
    ),
    "normal": Amount(
        large_puts=400,
        small_puts=1_000,
        single_puts=200,
        put_rounds=9,
        batches=60,
        runs=5,
        actors=(1, 4, 16),
        scaling_batches=24,
        memory_groups=50_000,
        waste_seconds=10.0,
    ),
    "long": Amount(
        large_puts=400,
        small_puts=2_000,
        single_puts=1_000,
        put_rounds=21,
        batches=300,
        runs=9,
        actors=(1, 4, 16, 64),
        scaling_batches=200,
        memory_groups=1_000_000,
        waste_seconds=60.0,
    ),
}


def run(length: Length) -> list[Figure]:
    """queue.durable_put, queue.durable_put_16kb, queue.put_*, queue.groups*, queue.memory, queue.file, queue.waste_*,
    queue.stall_*."""
    amount = AMOUNT[length]
    return [
        queue_puts.durable_put("queue.durable_put", LARGE, groups=amount.large_puts, rounds=amount.put_rounds),
        queue_puts.durable_put("queue.durable_put_16kb", KB16, groups=amount.small_puts, rounds=amount.put_rounds),
        *queue_puts.put_latency(LARGE, groups=amount.single_puts, rounds=amount.put_rounds),
        queue_runs.groups(batches=amount.batches, runs=amount.runs),
        *queue_runs.scaling(amount.actors, batches=amount.scaling_batches, runs=amount.runs),
        *queue_runs.memory(amount.memory_groups),
        *queue_runs.waste(seconds=amount.waste_seconds),
    ]
