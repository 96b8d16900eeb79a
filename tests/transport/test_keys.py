from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import stat
from pathlib import Path

import psutil
import pytest
import trio
import zmq

import lachesis
from lachesis_configs.load import ConfigError, load_config
from lachesis_configs.schema import Config
from lachesis_deploy.folder import placed
from lachesis_deploy.status import ask_status
from lachesis_transport.broker import serve_queue
from lachesis_transport.client import QueueError, queue_status
from lachesis_transport.consumer import open_consumer
from lachesis_transport.keys import Keys, load_keys, make_keys
from lachesis_transport.messages import MAX_MESSAGE_BYTES
from lachesis_transport.producer import open_producer
from lachesis_transport.sockets import CURVE_BYTES, open_socket

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).with_name("groups.py"))
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)

SECONDS = 20
BLOCK = bytes(range(256)) * 4096
ADMITTED_WITHIN = 1.0
"""Seconds that a stranger tries; a client with the right key is through in a few hundredths."""


def copied(source: Path, folder: Path, *names: str) -> Keys:
    folder.mkdir()
    for name in names:
        shutil.copy(source / name, folder)
    return Keys(folder)


@pytest.fixture
def fleet(tmp_path: Path) -> tuple[Keys, Keys]:
    """The keys of a listener's node and of a client's, each with no more files than it needs."""
    made = tmp_path / "made"
    make_keys(made)
    return (
        copied(made, tmp_path / "listener", "server.key_secret", "client.key"),
        copied(made, tmp_path / "client", "client.key_secret", "server.key"),
    )


async def echo(server) -> None:
    while True:
        route, frame = await server.receive()
        assert server.send_nowait([route.bytes, frame])


async def reaches(address: str, keys: Keys | None, *, seconds: float = SECONDS) -> bool:
    """Whether a client with `keys` gets an answer in time."""
    async with open_socket(zmq.DEALER, connect=address, keys=keys) as client:
        with trio.move_on_after(seconds):
            await client.send([b"?"])
            return [frame.bytes for frame in await client.receive()] == [b"?"]
    return False


@pytest.mark.trio
async def test_who_has_the_right_keys_is_served_with_messages_of_any_size(fleet):
    listener, client = fleet
    with trio.fail_after(SECONDS):
        async with open_socket(zmq.ROUTER, bind="tcp://0.0.0.0:0", keys=listener) as server:
            address = server.address.replace("0.0.0.0", "127.0.0.1")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo, server)
                for keys in (client, listener):  # the listener's own node connects by its secret
                    async with open_socket(zmq.DEALER, connect=address, keys=keys) as socket:
                        for size in (0, 1, 1000, len(BLOCK)):
                            await socket.send([BLOCK[:size]])
                            assert (await socket.receive())[0].bytes == BLOCK[:size]
                nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_strangers_get_nowhere_and_harm_nobody(fleet, tmp_path, caplog):
    """No key, a key that is not admitted, a foreign server's key: no message comes through, in either direction."""
    listener, client = fleet
    make_keys(tmp_path / "other")
    unknown = copied(tmp_path / "other", tmp_path / "unknown", "client.key_secret")
    shutil.copy(client.folder / "server.key", unknown.folder)
    foreign = copied(tmp_path / "other", tmp_path / "foreign", "server.key")
    shutil.copy(client.folder / "client.key_secret", foreign.folder)
    caplog.set_level(logging.DEBUG)
    with trio.fail_after(SECONDS):
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", keys=listener) as server:
            assert await reaches_through(server, client)
            answers = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo, server)

                async def attempt(keys: Keys | None) -> None:
                    answers.append(await reaches(server.address, keys, seconds=ADMITTED_WITHIN))

                async with trio.open_nursery() as strangers:
                    for keys in (None, unknown, foreign):
                        strangers.start_soon(attempt, keys)
                    for _ in range(5):
                        assert await reaches(server.address, client)
                assert await reaches(server.address, client)
                nursery.cancel_scope.cancel()
            assert answers == [False, False, False]
    refusals = [record.getMessage() for record in caplog.records if "not admitted" in record.getMessage()]
    assert refusals == [f"{server_address(refusals)}: the key of a client at 127.0.0.1 is not admitted"]
    for folder in tmp_path.iterdir():
        for path in folder.glob("*.key_secret"):
            assert secret_of(path) not in caplog.text


def server_address(refusals: list[str]) -> str:
    return refusals[0].partition(": ")[0]


async def reaches_through(server, keys: Keys) -> bool:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(echo, server)
        answered = await reaches(server.address, keys)
        nursery.cancel_scope.cancel()
    return answered


def secret_of(path: Path) -> str:
    return path.read_text().rpartition('secret-key = "')[2].partition('"')[0]


@pytest.mark.trio
async def test_a_flood_without_keys_takes_no_memory(fleet):
    listener, client = fleet
    process, flood = psutil.Process(), 64
    with trio.fail_after(SECONDS), zmq.Context() as context:
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", keys=listener) as server:
            assert await reaches_through(server, client)
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                stranger.sndhwm = flood
                stranger.connect(server.address)
                for _ in range(flood):
                    stranger.send(BLOCK, copy=False)
                before = process.memory_info().rss
                with trio.move_on_after(ADMITTED_WITHIN):
                    await server.receive()
                    pytest.fail("a message came through")
                assert process.memory_info().rss - before < flood * len(BLOCK) / 4
            assert await reaches_through(server, client)


@pytest.mark.trio
async def test_several_listeners_of_one_process_admit_each_its_own(tmp_path):
    fleets = []
    for name in ("a", "b"):
        make_keys(tmp_path / name)
        fleets.append(Keys(tmp_path / name))
    with trio.fail_after(SECONDS):
        async with (
            open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", keys=fleets[0]) as first,
            open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", keys=fleets[1]) as second,
            open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0") as plain,
        ):
            assert await reaches_through(first, fleets[0])
            assert await reaches_through(second, fleets[1])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo, first)
                nursery.start_soon(echo, plain)
                assert not await reaches(first.address, fleets[1], seconds=ADMITTED_WITHIN)
                async with open_socket(zmq.DEALER, connect=plain.address) as client:
                    await client.send([b"plain"])
                    assert (await client.receive())[0].bytes == b"plain"
                nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_clients_are_added_and_shut_out_by_their_files(fleet, tmp_path):
    listener, client = fleet
    make_keys(tmp_path / "made", "rack-2")
    second = copied(tmp_path / "made", tmp_path / "rack-2", "rack-2.key_secret", "server.key")
    shutil.copy(tmp_path / "made" / "rack-2.key", listener.folder)
    (listener.folder / "client.key").unlink()
    with trio.fail_after(SECONDS):
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", keys=listener) as server:
            assert await reaches_through(server, second)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo, server)
                assert not await reaches(server.address, client, seconds=ADMITTED_WITHIN)
                nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_the_largest_message_fits_with_keys_and_no_larger_one(fleet, monkeypatch):
    listener, client = fleet
    monkeypatch.setattr("lachesis_transport.sockets.MAX_MESSAGE_BYTES", 1000)
    with trio.fail_after(SECONDS):
        async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", keys=listener) as server:
            async with open_socket(zmq.DEALER, connect=server.address, keys=client) as socket:
                await socket.send([BLOCK[:1000]])
                assert (await server.receive())[1].bytes == BLOCK[:1000]
                await socket.send([BLOCK[:1001]])
                with trio.move_on_after(0.3):
                    await server.receive()
                    pytest.fail("larger than allowed")
    assert MAX_MESSAGE_BYTES + CURVE_BYTES < 1 << 31


@pytest.mark.trio
async def test_an_address_in_use_is_one_clear_error_with_keys_too(fleet):
    async with open_socket(zmq.ROUTER, bind="tcp://127.0.0.1:0", keys=fleet[0]) as first:
        with pytest.raises(OSError, match="cannot be bound: Address already in use"):
            async with open_socket(zmq.ROUTER, bind=first.address, keys=fleet[0]):
                pytest.fail("bound twice")


def configuration(keys: Keys | None) -> Config:
    run = {"keys": None if keys is None else str(keys.folder), "steps": 1}
    return Config.model_validate({"run": run, "queue": {"address": "tcp://127.0.0.1:0", "batch_groups": 2}})


@pytest.mark.trio
async def test_the_queue_end_to_end(fleet, tmp_path):
    listener, actors = (load_keys(configuration(keys)) for keys in fleet)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            address = await nursery.start(serve_queue, configuration(listener), tmp_path / "run")
            async with (
                open_consumer(address, "learner", "l1", listener) as consumer,
                open_producer(address, "actor-0", "a1", actors) as producer,
            ):
                version = await consumer.reserve(None)
                await consumer.published(version)
                producer.serving(version)
                for _ in range(2):
                    ticket = await producer.ticket(version=version, environment="sums")
                    group = groups.group(ticket.ticket, [ticket.version], actor="actor-0")
                    assert (await producer.put(group)).status == "accepted"
                assert len((await consumer.lease(version)).groups) == 2
                assert "step" in await queue_status(address, keys=actors)
                asked = await trio.to_thread.run_sync(lambda: ask_status(address, keys=actors))
                assert asked is not None
                assert "step" in asked
                with pytest.raises(QueueError, match="did not answer within"):
                    await queue_status(address, seconds=ADMITTED_WITHIN)
            nursery.cancel_scope.cancel()


def test_a_launch_names_the_folder_of_keys_for_every_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate({"run": {"keys": "k"}, "queue": {"address": "tcp://127.0.0.1:0"}})
    assert placed(config, tmp_path, tmp_path).run.keys == str(tmp_path / "k")


def test_no_keys_without_a_folder():
    assert load_keys(Config()) is None
    assert load_keys(Config.model_validate({"run": {"keys": "k"}})) == Keys(Path("k"))


def test_the_verb_makes_files_for_their_owner_alone_and_overwrites_none(tmp_path, capsys, monkeypatch):
    folder, umask = tmp_path / "fleet" / "keys", os.umask(0o022)
    try:
        assert lachesis.main(["keys", str(folder)]) == 0
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(umask)
    names = {"server.key", "server.key_secret", "client.key", "client.key_secret"}
    assert {path.name for path in folder.iterdir()} == names
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    said = capsys.readouterr().out
    assert "every other node: server.key, client.key_secret" in said
    assert not any(secret_of(path) in said for path in folder.glob("*.key_secret"))

    assert lachesis.main(["keys", str(folder)]) == 2
    assert f"{folder / 'server.key_secret'}: exists and is not overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before

    assert lachesis.main(["keys", str(folder), "--client", "rack-2"]) == 0
    assert {path.name for path in folder.iterdir()} == names | {"rack-2.key", "rack-2.key_secret"}
    capsys.readouterr()
    for name in ("server", "../x", "", "a b", "server.key", "x.key_secret"):
        assert lachesis.main(["keys", str(folder), "--client", name]) == 2
        assert f"--client: value {name!r}, expected a name of up to 64 of A-Z a-z 0-9 _ . -" in capsys.readouterr().err
    assert lachesis.main(["keys", str(tmp_path / "none"), "--client", "a"]) == 2
    assert not (tmp_path / "none").exists()


def test_keys_are_not_mixed_with_other_files(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"notes\.txt: is no key, expected a folder of its own"):
        make_keys(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_files_that_are_missing_or_malformed_are_named_and_secrets_are_not(fleet, tmp_path):
    listener, client = fleet
    foreign = tmp_path / "foreign"
    make_keys(foreign)

    def error(keys: Keys, kind: str) -> str:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            with pytest.raises(ConfigError) as info:
                (keys.secure_listener if kind == "listener" else keys.secure_client)(socket)
        text = str(info.value)
        assert not any(secret_of(path) in text for path in tmp_path.rglob("*.key_secret") if secret_of(path))
        return text

    assert error(Keys(tmp_path / "none"), "client").startswith(f"run.keys: {tmp_path / 'none'}: No such file")
    assert "server.key_secret: No such file" in error(client, "listener")
    (client.folder / "more.key_secret").write_text("")
    assert "holds client.key_secret, more.key_secret, expected one client's NAME.key_secret" in error(client, "client")
    (client.folder / "client.key_secret").unlink()
    assert "more.key_secret holds no public key" in error(client, "client")
    shutil.copy(foreign / "client.key", client.folder / "more.key_secret")
    assert "more.key_secret holds no secret key" in error(client, "client")
    (client.folder / "more.key_secret").unlink()
    assert "client holds none, expected one client's NAME.key_secret" in error(client, "client")
    shutil.copy(foreign / "client.key_secret", client.folder)
    (client.folder / "server.key").unlink()
    assert "server.key: No such file" in error(client, "client")

    (listener.folder / "client.key").write_bytes(b'public-key = "' + b"\xff" * 40 + b'"')
    assert "client.key holds no public key" in error(listener, "listener")
    (listener.folder / "client.key").write_bytes(b'public-key = "' + b"#" * 40 + b'"')
    assert "client.key holds no public key" in error(listener, "listener")
    (listener.folder / "client.key").unlink()
    text = (listener.folder / "server.key_secret").read_text()
    swapped = text.replace(secret_of(listener.folder / "server.key_secret"), secret_of(foreign / "server.key_secret"))
    (listener.folder / "server.key_secret").write_text(swapped)
    assert "server.key_secret holds no secret key with its public key" in error(listener, "listener")


def test_keys_that_are_not_where_they_belong_are_refused(tmp_path, caplog):
    folder = tmp_path / "keys"

    def listen() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            Keys(folder).secure_listener(socket)

    def refused(text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            listen()
        shutil.rmtree(folder)
        make_keys(folder)

    make_keys(folder)
    listen()
    (folder / "server.key_secret").chmod(0o640)
    refused(r"server\.key_secret has mode 0640, expected 0600: run chmod 600 .*server\.key_secret")
    shutil.copy(folder / "client.key_secret", folder / "client.key")
    refused(r"client\.key holds a secret key, expected the public one alone")
    shutil.copy(folder / "client.key_secret", folder / "server.key_secret")
    refused(r"server\.key_secret and .*server\.key are not of one pair")
    listen()
    assert caplog.text == ""
    (folder / "client.key").unlink()
    listen()
    assert f"{folder} holds no client's NAME.key: only who has server.key_secret can connect" in caplog.text


@pytest.mark.parametrize("verb", [["launch"], ["queue"], ["status"], ["actor"]])
def test_a_role_without_its_files_ends_with_one_line_and_code_2(tmp_path, capsys, verb):
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{keys: {tmp_path}, folder: {tmp_path / 'run'}}}")
    assert (
        lachesis.main([*verb, str(config), "queue.address=tcp://127.0.0.1:0", "weights.address=tcp://127.0.0.1:0"]) == 2
    )
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"lachesis {verb[0]}: run.keys: {tmp_path}")
    assert "lachesis keys FOLDER" in last


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5710", "tcp://10.1.2.3:5710", "tcp://node-7.cluster:5710", "tcp://node7:5710"]
)
def test_addresses_off_loopback_need_keys(tmp_path, address):
    path = tmp_path / "config.yaml"
    path.write_text("run: {keys: k}")
    assert load_config(path, [f"queue.address={address}"]).queue.address == address
    overrides = [f"weights.address={address.replace('5710', '5712')}", "weights.channel=stream"]
    assert load_config(path, overrides).run.keys == "k"
    path.write_text("")
    with pytest.raises(ConfigError) as error:
        load_config(path, [f"queue.address={address}"])
    assert error.value.lines == (
        f"queue.address: value {address!r}, expected a loopback address such as tcp://127.0.0.1:5710, or keys: set "
        "run.keys to a folder made by `lachesis keys`",
    )


def test_the_collective_channel_off_loopback_needs_trust(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("run: {keys: k}\nweights: {address: 'tcp://10.0.0.1:5711'}")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert error.value.lines == (
        "weights.channel: value 'collective' with weights.address 'tcp://10.0.0.1:5711', expected stream, or "
        "weights.trusted_network: true: the collective channel has no keys",
    )
    assert load_config(path, ["weights.channel=stream"]).weights.channel == "stream"
    assert load_config(path, ["weights.trusted_network=true"]).weights.channel == "collective"


@pytest.mark.parametrize("host", ["10.0.0.256", "10.0", "*", "a b", "-", "node..x", "x" * 64])
def test_what_is_no_host_is_refused_with_keys_too(tmp_path, host):
    path = tmp_path / "config.yaml"
    path.write_text("run: {keys: k}")
    with pytest.raises(ConfigError, match=r"queue\.address: value .*, expected an IPv4 address or a host name"):
        load_config(path, [f"queue.address=tcp://{host}:5710"])
