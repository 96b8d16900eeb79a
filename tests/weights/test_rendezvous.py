"""Keys and values of a group: several stores of one rendezvous, over real sockets."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
import zmq

from lachesis_transport.messages import pack, unpack
from lachesis_transport.weights import rendezvous as module
from lachesis_transport.weights.rendezvous import Rendezvous, RendezvousStore

LOOPBACK = "127.0.0.1"
EPOCH = 7


@pytest.fixture
def rendezvous():
    served = Rendezvous(LOOPBACK, epoch=EPOCH)
    yield served
    served.close()


@pytest.fixture
def stores(rendezvous):
    made = [RendezvousStore(LOOPBACK, rendezvous.port, seconds=20.0) for _ in range(2)]
    yield made
    for store in made:
        store.close()


def test_what_one_rank_sets_the_others_get_through_torchs_own_prefixes(stores):
    here, there = (dist.PrefixStore(str(EPOCH), store) for store in stores)
    here.set("a", "1")
    stores[0].set("7/b", b"\0\xff")
    assert there.get("a") == b"1"
    assert stores[1].get("7/a") == b"1"
    assert stores[1].get("7/b") == b"\0\xff"
    here.set("a", "2")
    assert there.get("a") == b"2"


def test_who_asks_early_waits(stores):
    got: list[bytes] = []

    def ask() -> None:
        stores[1].wait(["7/a", "7/b"])
        got.append(stores[1].get("7/b"))

    thread = threading.Thread(target=ask)
    thread.start()
    stores[0].set("7/a", "1")
    thread.join(0.2)
    assert got == []
    stores[0].set("7/b", "2")
    thread.join(20)
    assert got == [b"2"]


def test_waiting_ends_with_the_time_and_names_the_keys(stores):
    with pytest.raises(dist.DistStoreError, match=r"rendezvous: 7/a, 7/b: no answer within 0.05 s"):
        stores[0].wait(["7/a", "7/b"], timedelta(seconds=0.05))
    stores[1].set("7/a", "1")
    stores[1].set("7/b", "2")  # the answer to the question that was given up
    assert stores[0].get("7/a") == b"1"


def test_without_anybody_there_the_time_ends_too():
    gone = Rendezvous(LOOPBACK, epoch=EPOCH)
    gone.close()
    store = RendezvousStore(LOOPBACK, gone.port, seconds=0.05)
    with pytest.raises(RuntimeError, match="no answer"):
        store.set("7/a", "1")
    store.close()


def test_strangers_disturb_nothing(rendezvous, stores, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{LOOPBACK}:{rendezvous.port}")
        for frames in (
            [b""],
            [b"\xc1", b"?"],
            [pack({"id": 1, "keys": [1]})],
            [pack({"id": 1, "value": b""})],
            [pack({"id": 1, "key": "7/big", "value": bytes(101)})],
            [pack({"id": 2, "keys": ["7/a"]})],
        ):
            stranger.send_multipart(frames)
        stores[0].set("7/a", "1")
        assert stores[1].get("7/a") == b"1"
        for expected in ["error"] * 5 + ["values"]:
            assert stranger.poll(20_000)
            assert expected in unpack(stranger.recv())


def test_only_keys_of_the_group_are_kept(rendezvous, stores):
    for key in ("a", "8/a", "77/a"):
        with pytest.raises(dist.DistStoreError, match=f"rendezvous: {key}: refused: key: '{key}', expected one of the"):
            stores[0].set(key, "1")
        with pytest.raises(dist.DistStoreError, match=f"rendezvous: {key}: refused: keys: expected at most"):
            stores[0].get(key)
    assert rendezvous._values == {}


def test_a_key_that_is_set_again_counts_once(stores, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    for _ in range(5):
        stores[0].set("7/a", bytes(90))
    with pytest.raises(dist.DistStoreError, match=r"refused: value: 101 bytes in all, expected at most 100"):
        stores[0].set("7/b", bytes(5))
    stores[0].set("7/a", bytes(40))
    stores[0].set("7/b", bytes(50))
    assert stores[1].get("7/b") == bytes(50)


def test_every_answer_arrives_however_fast_they_follow(stores, monkeypatch):
    monkeypatch.setattr(module, "RESEND_SECONDS", 1_000.0)
    stores[0].set("7/a", "1")

    def ask(store):
        for _ in range(3_000):
            assert store.get("7/a") == b"1"

    with ThreadPoolExecutor() as pool:
        list(pool.map(ask, stores))


def test_a_lost_answer_costs_little(rendezvous, stores, monkeypatch):
    lost = []
    say = Rendezvous._say

    def lose_the_first(self, peer, message):
        lost.append(message["id"])  # before the answer is there
        if lost.count(message["id"]) > 1:
            say(self, peer, message)

    monkeypatch.setattr(Rendezvous, "_say", lose_the_first)
    stores[0].set("7/a", "1")
    assert stores[0].get("7/a") == b"1"
    assert min(lost.count(number) for number in (1, 2)) > 1


def test_an_address_that_is_not_here_is_refused():
    with pytest.raises(OSError, match=r"rendezvous: no port at 192.0.2.200"):
        Rendezvous("192.0.2.200", epoch=EPOCH)


def test_strangers_cannot_have_it_grow(rendezvous, stores, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 8)
    stores[0].set("7/big", b"x" * 500_000)
    context = zmq.Context()
    strangers = [context.socket(zmq.DEALER) for _ in range(12)]
    try:
        for stranger in strangers:
            stranger.linger = 2000
            stranger.connect(f"tcp://{LOOPBACK}:{rendezvous.port}")
        for question in (
            ["7/nothing"] * (module.MAX_KEYS + 1),
            ["7/" + "n" * (module.MAX_KEY_LENGTH + 1)],
            ["7/big"] * 3,
        ):
            strangers[0].send(pack({"id": 1, "keys": question}))
        for stranger in strangers[1:]:
            stranger.send(pack({"id": 1, "keys": ["7/nothing"]}))
        deadline = time.monotonic() + 20
        while len(rendezvous._waiting) < 7 and time.monotonic() < deadline:
            time.sleep(0.05)
        stores[1].set("7/small", b"y")
        assert stores[0].get("7/small") == b"y"
        assert 7 <= len(rendezvous._waiting) <= 8
        for _ in range(2):
            assert strangers[0].poll(20_000)
            assert "error" in unpack(strangers[0].recv())
        assert not strangers[0].poll(100), "an answer larger than a message may be"
    finally:
        context.destroy(linger=0)
