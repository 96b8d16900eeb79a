from __future__ import annotations

import json

import pytest

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config
from lachesis_deploy.folder import locked, write_config
from lachesis_deploy.resume import check_resumable, folder_to_resume, not_evaluated, nothing_left


def config(folder, **sections):
    run = {"name": "toy", "folder": str(folder), "steps": 8, **sections.pop("run", {})}
    model = {"path": "/models/a", **sections.pop("model", {})}
    return Config.model_validate({"run": run, "model": model, **sections})


def run_folder(path):
    path.mkdir()
    (path / "queue.db").touch()
    return path


def test_the_newest_run_goes_on(tmp_path):
    wanted = tmp_path / "toy"
    with pytest.raises(ConfigError, match=r"toy is not there, expected the folder of a run; without --resume"):
        folder_to_resume(config(wanted), "toy.yaml")
    wanted.mkdir()
    with pytest.raises(ConfigError, match=r"toy holds no queue\.db, expected"):
        folder_to_resume(config(wanted), "toy.yaml")
    (wanted / "queue.db").touch()
    assert folder_to_resume(config(wanted), "toy.yaml") == wanted
    second = run_folder(tmp_path / "toy-2")
    assert folder_to_resume(config(wanted), "toy.yaml") == second
    (tmp_path / "toy-3").mkdir()  # a launch that never got as far as a queue
    assert folder_to_resume(config(wanted), "toy.yaml") == second


def test_the_configuration_in_a_run_folder_means_the_run_there(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    run_folder(tmp_path / "toy-2")
    path = write_config(config(wanted), wanted)
    assert folder_to_resume(config(wanted), str(path)) == wanted


def test_only_what_means_nothing_to_queue_and_checkpoints_may_change(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    write_config(config(wanted), wanted)
    check_resumable(config(wanted), wanted)
    free = {
        "run": {"steps": 20},
        "learner": {"lr": 1e-3, "checkpoint_every": 3},
        "queue": {"address": "tcp://127.0.0.1:7"},
        "environments": [{"workers": 4}, {"name": "more", "path": "gsm8k"}],
        "actor": {"count": 2},
    }
    check_resumable(config(wanted, **free), wanted)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"run": {"seed": 1}}, "run.seed: value 1, expected 0"),
        ({"model": {"path": "/models/b"}}, "model.path: value '/models/b', expected '/models/a'"),
        ({"queue": {"batch_groups": 4}}, "queue.batch_groups: value 4, expected 8"),
        ({"staleness": {"max": 3}}, "staleness.max: value 3, expected 2"),
        ({"learner": {"ranks": 2}}, "learner.ranks: value 2, expected 1"),
        ({"environments": [{"path": "gsm8k"}]}, "environments.0.path: value 'gsm8k', expected 'arithmetic'"),
        (
            {"environments": [{"options": {"max_value": 3}}]},
            "environments.0.options: value {'max_value': 3}, expected {}",
        ),
    ],
)
def test_what_would_make_them_meaningless_is_named(tmp_path, changes, line):
    wanted = run_folder(tmp_path / "toy")
    write_config(config(wanted), wanted)
    with pytest.raises(ConfigError) as error:
        check_resumable(config(wanted, **changes), wanted)
    (only,) = error.value.lines
    assert only.startswith(f"{line} to resume {wanted}: ")


def test_steps_may_grow_but_not_below_what_is_trained(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    write_config(config(wanted), wanted)
    # Step 6 was lost with its learner.
    (wanted / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in (1, 2, 3, 4, 5, 6, 5)))
    check_resumable(config(wanted, run={"steps": 5}), wanted)
    with pytest.raises(ConfigError, match=r"run\.steps: value 4, expected 5 or more to resume .*: so many are trained"):
        check_resumable(config(wanted, run={"steps": 4}), wanted)


def test_nothing_is_left_of_a_finished_run_unless_it_shall_be_longer(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    assert not nothing_left(config(wanted), wanted)
    for state, left in (({"finished": False, "step": 8}, True), ({"finished": True, "step": 8}, False)):
        (wanted / "queue.json").write_text(json.dumps(state))
        assert nothing_left(config(wanted), wanted) is not left
    assert not nothing_left(config(wanted, run={"steps": 9}), wanted)


def test_a_final_evaluation_that_did_not_happen_is_named(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    assert not_evaluated(wanted) == []
    (wanted / "queue.json").write_text(json.dumps({"finished": True, "step": 8, "final": 9}))
    evaluated = [("sums", 0), ("chat", 0), ("chat", 9)]
    lines = (json.dumps({"kind": "evaluation", "environment": name, "version": v}) + "\n" for name, v in evaluated)
    (wanted / "events.jsonl").write_text("".join(lines))
    (line,) = not_evaluated(wanted)
    assert line.startswith("sums was not evaluated at version 9, the final one")
    assert f"model.path={wanted}/checkpoints/00000009" in line


def test_one_launch_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(ConfigError, match="another launch runs in it"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
