"""The queue as a user starts it: `lachesis queue`, asked by `lachesis status`."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time

import pytest
import yaml

LACHESIS = (sys.executable, "-m", "lachesis")


@pytest.fixture
def config(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run": {"folder": str(tmp_path / "run")}, "queue": {"address": address}}))
    return path


def lachesis(*arguments):
    return subprocess.run([*LACHESIS, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_a_queue_answers_refuses_a_twin_and_ends_well(config, tmp_path):
    with (tmp_path / "log").open("w") as log:
        queue = subprocess.Popen([*LACHESIS, "queue", str(config)], stderr=log)
    try:
        deadline = time.monotonic() + 30
        while (answer := lachesis("status", config)).returncode:
            assert time.monotonic() < deadline, answer.stderr
        assert re.search(r"^ready +0$", answer.stdout, re.MULTILINE)
        twin = lachesis("queue", config)
        assert twin.returncode == 2
        assert "cannot be bound" in twin.stderr
        assert len(twin.stderr.splitlines()) == 1
    finally:
        queue.terminate()
        assert queue.wait(30) == 0
    assert json.loads((tmp_path / "run" / "queue.json").read_text())["tickets_issued"] == 0
    assert "serves at tcp://127.0.0.1:" in (tmp_path / "log").read_text()
