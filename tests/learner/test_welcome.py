from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config
from lachesis_learner.checkpoint import Checkpoint, Record
from lachesis_learner.welcome import check_welcome
from lachesis_transport.client import QueueState, Welcome

CONFIG = Config.model_validate({"run": {"steps": 40}, "queue": {"batch_groups": 8}, "staleness": {"max": 2}})
PATH = Path("/runs/demo/checkpoints/00000012")


def consumer(queue_id="b2", *, current: int | None = 12, **changes):
    fields = {"run_name": "demo", "batch_groups": 8, "staleness_max": 2, "steps": 40, **changes}
    return SimpleNamespace(queue_id=queue_id, welcome=Welcome(**fields), state=QueueState(current=current))


def checkpoint(queue: str | None):
    record = Record(version=12, parent=11, step=12, run="demo", queue=queue, ranks=1)
    return Checkpoint(path=PATH, record=record)


def refused(*arguments):
    with pytest.raises(ConfigError) as error:
        check_welcome(CONFIG, *arguments)
    return error.value.lines


def test_without_a_checkpoint_any_queue_with_the_same_rules_will_do():
    check_welcome(CONFIG, consumer(), None)
    check_welcome(CONFIG, consumer(current=None), None)
    assert refused(consumer(batch_groups=4, steps=50), None) == (
        "queue.batch_groups: value 8, but the queue at tcp://127.0.0.1:5710 runs with 4; expected the same",
        "run.steps: value 40, but the queue at tcp://127.0.0.1:5710 runs with 50; expected the same",
    )


def test_a_checkpoint_goes_with_the_queue_whose_versions_it_names():
    check_welcome(CONFIG, consumer("b2"), checkpoint("b2"))
    (line,) = refused(consumer("b2"), checkpoint("a1"))
    assert line == (
        f"{PATH}: a checkpoint of version 12 of queue a1, but at tcp://127.0.0.1:5710 is queue b2, of run 'demo'; "
        "expected the queue that the checkpoint belongs to. Start that one in its own run folder (with its queue.db), "
        f"or start a new run from these weights: model.path={PATH}"
    )


@pytest.mark.parametrize("queue", ["b2", "a1", None])
def test_a_new_queue_has_no_checkpoints(queue):
    (line,) = refused(consumer("b2", current=None), checkpoint(queue))
    assert "is queue b2, which knows no versions yet; expected" in line


def test_a_checkpoint_of_a_replayed_file_goes_with_no_queue():
    (line,) = refused(consumer(), checkpoint(None))
    assert "a checkpoint of version 12 of a replayed file, without a queue, but at" in line
