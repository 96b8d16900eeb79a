"""`lachesis learner --replay`: train the groups of a file in order, without queue and publication."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from lachesis_configs.load import ConfigError
from lachesis_learner.lead import Lead
from lachesis_learner.metrics import MetricsWriter, Phases, step_line
from lachesis_learner.stop import Stop
from lachesis_transport.groups_file import read_groups
from lachesis_transport.messages import Batch, Group, MessageError, Scores


def replay_groups(lead: Lead, path: Path, stop: Stop) -> None:
    """Train the file's groups (`transport/groups_file.py`) until run.steps batches are done, none are left or a signal
    came, and print the last line of metrics.

    Tokens of version v > 0 have the staleness that they would have in the batch after v versions, others 0.

    Raises ConfigError when the file can't be read or holds no groups, or when the run folder is that of a run with a
    queue.
    """
    if not path.is_file():
        raise ConfigError([f"--replay: no file {path}"])
    if lead.checkpoint is not None and lead.checkpoint.record.queue is not None:
        raise ConfigError(
            [
                f"--folder: {lead.folder} holds {lead.checkpoint.path.name}, a checkpoint of the run with queue "
                f"{lead.checkpoint.record.queue}; expected a folder of its own for --replay"
            ]
        )
    try:
        next(read_groups(path), None)  # before anything is written beside
        line = _train(lead, path, stop)
    except MessageError as error:
        raise ConfigError([f"--replay: {error}"]) from error
    if line is None and not stop.requested and lead.step == 0:
        raise ConfigError([f"--replay: {path} holds no groups"])
    if lead.unsaved:
        lead.save(queue=None)
    if line is not None:
        print(json.dumps(line), flush=True)


def _train(lead: Lead, path: Path, stop: Stop) -> dict[str, Any] | None:
    """The last line of metrics."""
    size, line = lead.config.queue.batch_groups, None
    with MetricsWriter(lead.folder, step=lead.step) as metrics:
        groups = islice(read_groups(path), lead.step * size, None)
        phases = Phases()
        while lead.step < lead.config.run.steps and not stop.requested:
            chosen = tuple(islice(groups, size))
            if not chosen:
                break
            batch = _recorded(chosen, version=lead.step)
            trained = lead.train(batch, phases)
            lead.name(batch.version + 1)
            line = metrics.write(step_line(batch, trained, phases, [], step=lead.step, published=lead.version))
            phases = Phases()
            if lead.step % lead.config.learner.checkpoint_every == 0:
                with phases.phase("checkpoint"):
                    lead.save(queue=None)
    return line


def _recorded(groups: tuple[Group, ...], *, version: int) -> Batch:
    versions = {v for group in groups for v in group.versions}
    scores = Scores()
    for group in groups:
        scores += Scores.of([t.score for t in group.trajectories])
    return Batch(
        version=version,
        groups=groups,
        distances={v: max(0, version - v) if v > 0 else 0 for v in versions},
        scores=scores,
    )
