from __future__ import annotations

import pytest
import yaml

from lachesis_configs.schema import Config
from lachesis_deploy import inspection
from lachesis_deploy.inspection import NoQueue, look, print_inspection, queue_address
from lachesis_transport.decisions import Rules
from lachesis_transport.inspection import LISTED, inspect
from lachesis_transport.replay import Replay
from lachesis_transport.store import Refused

HEAD = {"source": "queue", "address": "tcp://127.0.0.1:1", "run": "demo", "queue": "q"}


def queue(**rules) -> Replay:
    replay = Replay(Rules(**{"batch_groups": 2, "staleness_max": 1, "steps": 9, **rules}))
    replay.join(role="actor", name="a", incarnation="1", now=0.0)
    replay.published(replay.reserve(parent=None, key="k"))
    return replay


@pytest.fixture
def printed(monkeypatch, tmp_path, capsys):
    """What is printed for the state of a queue."""

    def show(replay, quarantine=()):
        found = {**HEAD, **inspect(replay, quarantine, now=2.0)}
        monkeypatch.setattr(inspection, "look", lambda config, folder: found)
        assert print_inspection(Config(), tmp_path, as_json=False) == 0
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return show


def test_what_strangers_wrote_is_printed_as_plain_text(printed):
    replay = queue()
    replay.ticket(actor="a", ask=1, version=0, environment="\x1b[31m[bold]red\n", now=0.0)
    replay.count("frames_refused")
    lines = printed(replay, [Refused("a client", "no \x07 [/bold] " + "x" * 300, b"\xff" * 20, 0.0)])
    assert r"a      \x1b[31m[bold]red\n     1               0                   1" in lines
    assert all(line.isprintable() for line in lines)
    refused = " ".join(lines[lines.index("Quarantine") :])
    assert r"no \x07 [/bold]" in refused
    assert "ff" * 16 + "..." in refused


def test_sizes_and_shares_of_an_empty_queue(printed):
    lines = printed(queue(max_bytes=1536 << 20, max_uncommitted_bytes=512))
    held = [line.split() for line in lines]
    assert ["ready", "and", "leased", "0", "0", "B", "1.5", "GiB"] in held
    assert ["trained,", "in", "no", "checkpoint", "0", "0", "B", "512", "B"] in held
    assert "newest version   0, depth 0" in lines
    assert "learner          none" in lines
    assert lines[lines.index("Open tickets: 0") + 1] == "  none"


def test_lists_that_are_cut_say_so(printed):
    replay = queue()
    for number in range(LISTED + 2):
        replay.join(role="actor", name=f"b{number:03}", incarnation="1", now=0.0)
    lines = printed(replay)
    assert "  and 3 more" in lines
    assert sum(line.startswith("b") and "2.0 s ago" in line for line in lines) == LISTED - 1


def test_the_port_that_a_launch_chose_is_in_its_folder(tmp_path):
    config = Config.model_validate({"queue": {"address": "tcp://127.0.0.1:0"}})
    assert queue_address(config, tmp_path) == "tcp://127.0.0.1:0"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"queue": {"address": "tcp://127.0.0.1:4321"}}))
    assert queue_address(config, tmp_path) == "tcp://127.0.0.1:4321"


def test_port_0_without_a_launch_is_no_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "ANSWER_SECONDS", 0.1)
    config = Config.model_validate({"queue": {"address": "tcp://127.0.0.1:0"}})
    with pytest.raises(NoQueue, match=r"no queue answers at tcp://127.0.0.1:0 within"):
        look(config, tmp_path)
