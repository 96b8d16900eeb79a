from __future__ import annotations

import json

import pytest
import trio
from rich.console import Console

from lachesis_configs.schema import Config
from lachesis_deploy.panel import Progress, _panel, show_progress


def record(n, **fields):
    base = {"step": n, "time": 100.0 + 5 * n, "reward_mean": 0.5, "staleness_mean": 0.75, "staleness_max": 2}
    return {**base, "loss": -0.01, "tokens_per_second": 321.4, "seconds_total": 5.0, **fields}


def test_a_step_is_one_line():
    progress = Progress(steps=40, staleness_bound=2, batch_groups=8)
    progress.step(record(9))
    assert progress.step(record(10)) == (
        "step 10/40  reward 0.500  staleness 0.75 (max 2 of 2)  loss -0.0100  learner 321 tok/s  5.0 s  left 2:30"
    )


def test_what_is_not_known_yet_is_a_question_mark():
    progress = Progress(steps=40, staleness_bound=2, batch_groups=8)
    rows = dict(progress.rows())
    assert rows["reward"] == "?"
    assert rows["step"] == "0/40, left ?"
    assert progress.step({}).startswith("step ?/40  reward ?")


def test_the_estimate_follows_the_last_steps():
    progress = Progress(steps=100, staleness_bound=2, batch_groups=8)
    progress.step(record(1, time=0.0))
    for n in range(2, 20):
        progress.step(record(n, time=1000.0 + 2 * n))
    assert progress.remaining == "2:42"  # 81 steps of 2 s


def test_actor_pace_is_that_of_the_last_half_minute():
    progress = Progress(steps=10, staleness_bound=2, batch_groups=8)
    assert progress.actor_tokens_per_second is None
    for start in range(0, 100, 5):
        tokens = 5000 if start < 60 else 500
        assert progress.event({"kind": "activity", "start": start, "end": start + 5, "tokens": tokens}) is None
    assert progress.actor_tokens_per_second == pytest.approx(100)


def test_events_for_people():
    progress = Progress(steps=10, staleness_bound=2, batch_groups=8)
    evaluation = {"kind": "evaluation", "environment": "sums", "version": 3, "metrics": {"accuracy": 0.5, "x": None}}
    assert progress.event(evaluation) == "evaluation of sums at version 3: accuracy 0.500"
    assert "differ" in progress.event({"kind": "checksum_mismatch", "source": "actor-0", "version": 3})
    restored = {"kind": "weights_restored", "source": "learner", "version": 3, "damaged": 0}
    assert progress.event(restored) is None
    line = "learner: 2 damaged files of weights were not used, see its log"
    assert progress.event({**restored, "damaged": 2}) == line
    assert progress.event({"kind": "activation", "pause_seconds": 0.25}) is None
    assert dict(progress.rows())["last pause"] == "0.250 s"


@pytest.mark.trio
async def test_plain_lines_when_stdout_is_no_terminal(tmp_path, capsys, autojump_clock):
    with trio.move_on_after(3):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show_progress, Config(), tmp_path)
            await trio.sleep(1)
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record(1)) + "\n")
            await trio.sleep(1)
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record(2)) + "\n")
            nursery.cancel_scope.cancel()  # what was written last is shown all the same
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/40", "step 2/40"]


@pytest.mark.trio
async def test_groups_without_anything_to_train_on_are_told_of(tmp_path, capsys, autojump_clock, monkeypatch):
    monkeypatch.setattr("lachesis_deploy.drought.LEAST_SECONDS", 0.0)

    def write(voided):
        (tmp_path / "queue.json").write_text(json.dumps({"groups_accepted": 0, "tickets_voided": voided}))

    write({})
    with trio.move_on_after(9):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show_progress, Config(), tmp_path)
            await trio.sleep(1)
            write({"no_variance": 15})
            await trio.sleep(1)
            assert capsys.readouterr().out == ""
            write({"no_variance": 17})
            await trio.sleep(3)
            nursery.cancel_scope.cancel()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no group to train on since ")
    assert line.endswith(": 17 with equal scores throughout, so without advantages")


@pytest.mark.trio
async def test_a_resumed_run_does_not_tell_its_first_part_again(tmp_path, capsys, autojump_clock):
    path = tmp_path / "metrics.jsonl"

    def write(path, *records):
        path.write_text("".join(json.dumps(each) + "\n" for each in records))

    write(path, record(1), record(2), record(3))
    evaluation = {"kind": "evaluation", "environment": "sums", "version": 0, "metrics": {"accuracy": 0.5}}
    write(tmp_path / "events.jsonl", evaluation)
    with trio.move_on_after(9):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show_progress, Config(), tmp_path)
            await trio.sleep(1)
            # The learner that comes back knows of two steps, and trains the third once more.
            write(tmp_path / "new", record(1), record(2))
            (tmp_path / "new").replace(path)
            await trio.sleep(1)
            with path.open("a") as file:
                file.write(json.dumps(record(3, time=5000.0)) + "\n" + json.dumps(record(4, time=5002.0)) + "\n")
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/40", "step 4/40"]
    assert lines[1].endswith("left 1:12")  # 36 steps of 2 s: the time before the resume is no pace


def test_the_panel_shows_values_and_the_last_line_of_every_log(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner.log").write_text("first\nwaiting for a batch\n")
    progress = Progress(steps=40, staleness_bound=2, batch_groups=8)
    progress.step(record(10))
    progress.queue = {"ready": 3, "live_tickets": 20}
    for now, count in ((0.0, 0), (60.0, 16)):
        progress.drought.look({"groups_accepted": 0, "tickets_voided": {"no_variance": count}}, now=now)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(_panel(progress, Config(), tmp_path, 61.0))
    text = console.export_text()
    assert "run  1:01" in text
    assert "10/40, left ?" in text
    assert "3 groups ready, 20 tickets live" in text
    assert "waiting for a batch" in text
    assert ": 16 with equal scores throughout" in text
    assert "first" not in text
