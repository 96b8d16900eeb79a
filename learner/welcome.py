"""Whether a learner and the queue that it meets belong together."""

from __future__ import annotations

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config
from lachesis_learner.checkpoint import Checkpoint
from lachesis_transport.consumer import Consumer


def check_welcome(config: Config, consumer: Consumer, checkpoint: Checkpoint | None) -> None:
    """Raises ConfigError when the queue runs with other rules, or `checkpoint` is none of this queue's run.

    A version means something to the queue that gave it, and to no other: groups trained since the checkpoint would be
    lost or trained twice. Without a checkpoint any queue will do.
    """
    welcome, address = consumer.welcome, config.queue.address
    lines = [
        f"{key}: value {ours}, but the queue at {address} runs with {theirs}; expected the same"
        for key, ours, theirs in (
            ("queue.batch_groups", config.queue.batch_groups, welcome.batch_groups),
            ("staleness.max", config.staleness.max, welcome.staleness_max),
            ("run.steps", config.run.steps, welcome.steps),
        )
        if ours != theirs
    ]
    if checkpoint is not None and (checkpoint.record.queue != consumer.queue_id or consumer.state.current is None):
        lines.append(_strange(checkpoint, consumer, address))
    if lines:
        raise ConfigError(lines)


def _strange(checkpoint: Checkpoint, consumer: Consumer, address: str) -> str:
    record = checkpoint.record
    of = f"queue {record.queue}" if record.queue else "a replayed file, without a queue"
    found = "which knows no versions yet" if consumer.state.current is None else f"of run {consumer.welcome.run_name!r}"
    return (
        f"{checkpoint.path}: a checkpoint of version {record.version} of {of}, but at {address} is queue "
        f"{consumer.queue_id}, {found}; expected the queue that the checkpoint belongs to. Start that one in its own "
        f"run folder (with its queue.db), or start a new run from these weights: model.path={checkpoint.path}"
    )
