from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lachesis_configs.load import ConfigError, load_config
from lachesis_configs.schema import Config
from lachesis_deploy.folder import default_folder, fresh_folder, make_folder, placed, write_config, write_whole


def config(**sections):
    return Config.model_validate(sections)


@pytest.fixture
def listener():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        yield taken.getsockname()[1]


def test_a_run_never_writes_into_another(tmp_path):
    wanted = tmp_path / "demo"
    assert fresh_folder(wanted) == wanted
    assert fresh_folder(wanted) == wanted  # still empty
    (wanted / "config.yaml").touch()
    assert fresh_folder(wanted) == tmp_path / "demo-2"
    (tmp_path / "demo-2" / "config.yaml").touch()
    assert fresh_folder(wanted) == tmp_path / "demo-3"


def test_where_no_folder_can_be_the_field_is_named(tmp_path):
    (tmp_path / "file").touch()
    for impossible in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/x")):
        with pytest.raises(
            ConfigError, match=rf"^run\.folder: value '{impossible}', expected a folder, or a path where"
        ):
            fresh_folder(impossible)
    with pytest.raises(ConfigError, match=r"^--folder: value '/proc/x', expected a folder"):
        make_folder(Path("/proc/x"), key="--folder")


def test_default_folder():
    assert default_folder(config(run={"name": "sums"})) == Path("runs/sums")
    assert default_folder(config(run={"name": "sums", "folder": "/data/x"})) == Path("/data/x")


def test_taken_addresses_are_named_with_their_keys(tmp_path, listener):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        addresses = [f"tcp://127.0.0.1:{port}" for port in (listener, other.getsockname()[1])]
        taken = config(queue={"address": addresses[0]}, weights={"address": addresses[1]})
        with pytest.raises(ConfigError) as error:
            placed(taken, tmp_path, tmp_path)
    assert error.value.lines == (
        f"queue.address: {addresses[0]} is in use, expected a free address of this node",
        f"weights.address: {addresses[1]} is in use, expected a free address of this node",
    )


def test_a_taken_gateway_port_is_named(tmp_path, listener):
    ports = {"queue": {"address": "tcp://127.0.0.1:0"}, "weights": {"address": "tcp://127.0.0.1:0"}}
    with pytest.raises(ConfigError, match=r"actor.port \+ 1"):
        placed(config(**ports, actor={"port": listener - 1, "count": 2}), tmp_path, tmp_path)


def test_placed_config_says_all_that_a_role_needs(tmp_path):
    ports = {"queue": {"address": "tcp://127.0.0.1:0"}, "weights": {"address": "tcp://127.0.0.1:0"}}
    ready = placed(config(**ports), tmp_path / "run", tmp_path / "model")
    assert ready.run.folder == str(tmp_path / "run")
    assert ready.model.path == str(tmp_path / "model")
    assert not ready.queue.address.endswith(":0")
    assert ready.queue.address != ready.weights.address
    assert load_config(write_config(ready, tmp_path)) == ready


def test_a_file_is_written_whole(tmp_path):
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", "two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "two")]
