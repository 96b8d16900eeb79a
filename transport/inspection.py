"""What the queue holds and does, for people and programs: plain values made from its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lachesis_transport.replay import Replay
from lachesis_transport.store import Refused


def inspect(replay: Replay, quarantine: Sequence[Refused], *, now: float) -> dict[str, Any]:
    """Everything that `lachesis queue --inspect` shows."""
    return {"statistics": replay.statistics(), "refused": [[r.sender, r.reason] for r in quarantine]}
