"""Makes the queue's trajectories of a posted group: provenance, advantages and scores put together. Pure."""

from __future__ import annotations

import numpy as np

from lachesis_actors.advantages import Mode, token_advantages
from lachesis_actors.provenance import Provenance
from lachesis_actors.scored_data import ScoredGroup
from lachesis_transport.messages import Trajectory


def make_trajectories(
    group: ScoredGroup, *, ticket: int | None, mode: Mode, provenance: Provenance
) -> tuple[Trajectory, ...]:
    """The trajectories of one group, sampled under `ticket`.

    Raises NoVariance and AdvantageError before it looks into the provenance, and ProvenanceError, which changes nothing
    there.
    """
    advantages = token_advantages(
        mode, scores=group.scores, masks=group.masks, given=group.advantages, zeroed=group.zeroed
    )
    matched = provenance.match(ticket, group.tokens, group.masks)
    return tuple(
        Trajectory(
            tokens=tokens,
            mask=match.mask,
            logprobs=match.logprobs,
            versions=match.versions,
            advantages=np.where(match.mask.astype(bool), advantage, np.float32(0)),
            score=score,
            finished=match.finished,
        )
        for tokens, match, advantage, score in zip(group.tokens, matched, advantages, group.scores, strict=True)
    )
