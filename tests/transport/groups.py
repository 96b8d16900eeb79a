"""Small groups for the queue's tests."""

from __future__ import annotations

import numpy as np

from lachesis_transport.messages import Group, Trajectory


def trajectory(versions: list[int], score: float = 1.0) -> Trajectory:
    """One prompt token and then a sampled token a version."""
    n = len(versions) + 1
    mask = np.ones(n, np.uint8)
    mask[0] = 0
    return Trajectory(
        tokens=np.arange(n, dtype=np.int32),
        mask=mask,
        logprobs=-0.5 * mask.astype(np.float32),
        versions=np.array([-1, *versions], np.int32),
        advantages=mask.astype(np.float32),
        score=score,
    )


def group(
    ticket: int,
    versions: list[int],
    *,
    index: int = 0,
    actor: str = "a",
    environment: str = "sums",
    scores: tuple[float, ...] = (1.0, 0.0),
):
    """A group of one trajectory a score, each with one trained token a version."""
    return Group(
        group_id=f"{ticket}:{index}",
        ticket=ticket,
        actor=actor,
        environment=environment,
        trajectories=tuple(trajectory(versions, score) for score in scores),
    )
