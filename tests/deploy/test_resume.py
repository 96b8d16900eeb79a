from __future__ import annotations

import json

import pytest

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config
from lachesis_deploy.folder import locked, write_config
from lachesis_deploy.resume import check_resumable, not_evaluated, nothing_left, run_to_resume
from lachesis_transport.event_log import EventLog
from lachesis_transport.sqlite_store import SqliteStore
from lachesis_transport.store import Writing


def config(folder, **sections):
    run = {"name": "toy", "folder": str(folder), "steps": 8, **sections.pop("run", {})}
    model = {"path": "/models/a", **sections.pop("model", {})}
    return Config.model_validate({"run": run, "model": model, **sections})


def run_folder(path):
    path.mkdir()
    (path / "queue.db").touch()
    return path


def trained(folder, *, steps):
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n + 1}}}\n' for n in range(steps)))


def resumed(wanted, path="toy.yaml"):
    """Folder, what it holds, and the folders that were passed over."""
    found = run_to_resume(config(wanted), path)
    return found.folder.name, found.holds, [line.split(":")[0].split("/")[-1] for line in found.passed_over]


def test_the_newest_run_goes_on(tmp_path):
    wanted = tmp_path / "toy"
    with pytest.raises(ConfigError, match=r"toy is not there, expected the folder of a run; without --resume"):
        run_to_resume(config(wanted), "toy.yaml")
    wanted.mkdir()
    with pytest.raises(ConfigError, match=r"toy holds no queue\.db, expected"):
        run_to_resume(config(wanted), "toy.yaml")
    assert not any(wanted.iterdir())
    (wanted / "queue.db").touch()
    assert resumed(wanted) == ("toy", None, [])
    trained(wanted, steps=3)
    assert resumed(wanted) == ("toy", "is trained up to step 3", [])
    trained(run_folder(tmp_path / "toy-2"), steps=1)
    assert resumed(wanted) == ("toy-2", "is trained up to step 1", [])


def test_launches_that_got_nowhere_are_passed_over(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    trained(wanted, steps=3)
    run_folder(tmp_path / "toy-2")
    (tmp_path / "toy-3").mkdir()
    found = run_to_resume(config(wanted), "toy.yaml")
    assert (found.folder, found.passed_over) == (
        wanted,
        (
            f"passed over {tmp_path}/toy-3: it holds no queue.db",
            f"passed over {tmp_path}/toy-2: nothing was trained in it",
        ),
    )
    (wanted / "metrics.jsonl").unlink()  # now all are alike, and the newest with a queue goes on
    assert resumed(wanted) == ("toy-2", None, ["toy-3"])


@pytest.mark.trio
async def test_a_checkpoint_or_groups_are_something_to_go_on_from(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    trained(wanted, steps=3)
    second = tmp_path / "toy-2"
    second.mkdir()
    store = SqliteStore(second / "queue.db", EventLog(second / "events.jsonl"))
    try:
        assert resumed(wanted) == ("toy", "is trained up to step 3", ["toy-2"])
        await store.save(Writing(contents={"1:0": b"group"}))
    finally:
        await store.close()
    assert resumed(wanted) == ("toy-2", "has groups to train (1)", [])
    third = run_folder(tmp_path / "toy-3")
    (third / "checkpoints" / ".00000004.part").mkdir(parents=True)
    assert resumed(wanted)[0] == "toy-2"
    (third / "checkpoints" / "00000004").mkdir()
    (third / "checkpoints" / "00000004" / "record.json").touch()
    assert resumed(wanted) == ("toy-3", "has a checkpoint", [])


def test_no_older_run_takes_the_place_of_one_that_was_trained_or_runs(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    trained(wanted, steps=3)
    second = run_folder(tmp_path / "toy-2")
    with locked(second), pytest.raises(ConfigError, match=r"toy-2: another launch runs in it"):
        run_to_resume(config(wanted), "toy.yaml")
    trained(second, steps=2)
    (second / "queue.db").unlink()
    with pytest.raises(
        ConfigError, match=r"toy-2/queue\.db is missing though .*toy-2 is trained up to step 2, .*OLDER/config"
    ):
        run_to_resume(config(wanted), "toy.yaml")


def test_the_configuration_in_a_run_folder_means_the_run_there(tmp_path):
    wanted = run_folder(tmp_path / "toy")
    trained(run_folder(tmp_path / "toy-2"), steps=1)
    path = write_config(config(wanted), wanted)
    assert resumed(wanted, str(path)) == ("toy", None, [])


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
    missing = "sums was not evaluated at version 9, the final one, before the run was ended"
    assert not_evaluated(wanted) == [missing]
    checkpoint = wanted / "checkpoints" / "00000009"
    checkpoint.mkdir(parents=True)
    changes = f"model.path={checkpoint} run.folder={wanted}-evaluation run.steps=1"
    command = f"`lachesis launch {wanted}/config.yaml {changes}` evaluates those weights"
    first, second = not_evaluated(wanted)
    assert (first, second.split(",")[0]) == (missing, command)


def test_one_launch_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(ConfigError, match="another launch runs in it"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
