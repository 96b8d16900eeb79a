from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

from model import Learner, write_model

from lachesis_actors.weight_receiver import Receiver, ReceiverRefused
from lachesis_learner.shards import ShardBlob
from lachesis_transport.messages import MessageError, pack
from lachesis_transport.weights.checksum import combine
from lachesis_transport.weights.codec import CodecError
from lachesis_transport.weights.mirror import Mirror


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    learner = Learner(write_model(tmp_path), ranks=2)
    learner.blobs(anchor=True)
    return learner


@pytest.fixture
def receiver(learner: Learner, tmp_path: Path) -> Receiver:
    receiver = Receiver(Mirror.load(tmp_path), address="tcp://127.0.0.1:1", token="t", worker=0)
    receiver.obey({"op": "know", "version": 0})
    return receiver


def delta(learner: Learner) -> tuple[dict[str, Any], bytes]:
    parts = [ShardBlob.from_wire(blob) for blob in learner.blobs()]
    checksum = combine(learner.layout, [part.checksums for part in parts])
    sizes = [len(part.payload) for part in parts]
    payload = b"".join(bytes(part.payload) for part in parts)
    return {"version": 1, "parent": 0, "checksum": checksum, "sizes": sizes, "shards": 2}, payload


def test_a_streamed_delta_makes_the_published_weights(receiver: Receiver, learner: Learner) -> None:
    learner.step()
    step, payload = delta(learner)
    receiver.obey({"op": "begin", **step})
    receiver.obey({"op": "chunk", "offset": 0}, memoryview(payload[:100]))
    receiver.obey({"op": "chunk", "offset": 100}, memoryview(payload[100:]))
    assert receiver.obey({"op": "commit"}) == {"version": 1, "checksum": step["checksum"]}
    assert receiver.obey({"op": "state", "shards": 2}) == {"version": 1, "checksum": step["checksum"]}
    for name, tensor in receiver.mirror.tensors():
        assert torch.equal(tensor, learner.tensors[name])


def test_a_verified_result_is_hashed_again_only_when_asked(receiver: Receiver, learner: Learner) -> None:
    learner.step()
    step, payload = delta(learner)
    receiver.obey({"op": "begin", **step})
    receiver.obey({"op": "chunk", "offset": 0}, memoryview(payload))
    receiver.obey({"op": "commit"})
    receiver.mirror.bits[3] ^= 1
    held = receiver.obey({"op": "state", "shards": 2, "again": False})["checksum"]
    assert held == step["checksum"]
    assert receiver.obey({"op": "state", "shards": 3, "again": False})["checksum"] == receiver.mirror.checksum(shards=3)
    assert receiver.obey({"op": "state", "shards": 2, "again": True})["checksum"] == receiver.mirror.checksum(shards=2)
    raw = receiver.mirror.bits.tobytes()
    receiver.obey({"op": "begin", **step, "version": 2, "parent": None, "sizes": [len(raw)]})
    receiver.obey({"op": "state", "shards": 2, "again": False})
    receiver.obey({"op": "chunk", "offset": 0}, memoryview(raw[:6] + b"12" + raw[8:]))
    changed = receiver.obey({"op": "state", "shards": 2, "again": False})["checksum"]
    assert changed == receiver.mirror.checksum(shards=2) != held


def test_an_anchor_is_written_straight_into_the_mirror(receiver: Receiver, learner: Learner) -> None:
    learner.step()
    step, _ = delta(learner)
    mirror = Mirror(learner.layout, {n: tuple(t.shape) for n, t in learner.tensors.items()})
    for name, tensor in mirror.tensors():
        tensor.copy_(learner.tensors[name])
    raw = mirror.bits.tobytes()
    anchor = {**step, "version": 9, "parent": None, "sizes": [len(raw)]}
    receiver.obey({"op": "begin", **anchor})
    receiver.obey({"op": "chunk", "offset": 0}, memoryview(raw[:1000]))
    assert receiver.version is None
    with pytest.raises(ReceiverRefused, match="commit: the transfer is not complete"):
        receiver.obey({"op": "commit"})
    receiver.obey({"op": "begin", **anchor})
    receiver.obey({"op": "chunk", "offset": 0}, memoryview(raw))
    assert receiver.obey({"op": "commit"})["version"] == 9


def test_a_wrong_result_is_not_called_a_version(receiver: Receiver, learner: Learner) -> None:
    learner.step()
    step, payload = delta(learner)
    receiver.mirror.bits[3] ^= 1
    receiver.obey({"op": "begin", **step})
    receiver.obey({"op": "chunk", "offset": 0}, memoryview(payload))
    answer = receiver.obey({"op": "commit"})
    assert answer["version"] is None
    assert answer["checksum"] != step["checksum"]
    with pytest.raises(ReceiverRefused, match="delta to version 0, but this mirror holds None"):
        receiver.obey({"op": "begin", **step})


def test_a_malformed_payload_changes_nothing(receiver: Receiver, learner: Learner) -> None:
    learner.step()
    step, payload = delta(learner)
    before = receiver.mirror.bits.copy()
    receiver.obey({"op": "begin", **step})
    receiver.obey({"op": "chunk", "offset": 0}, memoryview(payload[:50] + b"\0" * (len(payload) - 50)))
    with pytest.raises(CodecError):
        receiver.obey({"op": "commit"})
    assert receiver.version == 0
    np.testing.assert_array_equal(receiver.mirror.bits, before)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"op": "dance"}, "op: 'dance', expected one of state"),
        ({"parent": 5}, "parent: delta to version 5, but this mirror holds 0"),
        ({"sizes": [1 << 40]}, "sizes: 1099511627776 bytes, expected at most"),
        ({"sizes": []}, "sizes: .*, expected a list of bytes a shard"),
        ({"parent": None, "sizes": [8]}, "sizes: anchor of 8 bytes, expected"),
        ({"version": "one"}, "version: 'one', expected int"),
    ],
)
def test_what_does_not_fit_is_refused(receiver: Receiver, change: dict[str, Any], error: str) -> None:
    step = {"op": "begin", "version": 1, "parent": 0, "checksum": "", "sizes": [10], "shards": 1}
    with pytest.raises((MessageError, ReceiverRefused), match=error):
        receiver.obey({**step, **change})
    assert receiver.version == 0


def test_chunks_come_in_order_and_end_where_they_should(receiver: Receiver) -> None:
    receiver.obey({"op": "begin", "version": 1, "parent": 0, "checksum": "", "sizes": [10], "shards": 1})
    with pytest.raises(ReceiverRefused, match="offset: 4, expected 0"):
        receiver.obey({"op": "chunk", "offset": 4}, memoryview(b"abcd"))
    with pytest.raises(ReceiverRefused, match="chunk: ends at 11, expected at most 10"):
        receiver.obey({"op": "chunk", "offset": 0}, memoryview(b"abcdefghijk"))


def test_only_the_held_version_is_prepared(receiver: Receiver) -> None:
    prepared: list[int] = []
    receiver._to_prepare = lambda version, mirror: prepared.append(version)
    with pytest.raises(ReceiverRefused, match="version: 1, but this mirror holds 0"):
        receiver.obey({"op": "prepare", "version": 1})
    assert receiver.obey({"op": "prepare", "version": 0}) == {"version": 0}
    assert prepared == [0]


def test_a_failed_preparation_is_an_answer(receiver: Receiver) -> None:
    def fail(version: int, mirror: Mirror) -> None:
        raise MemoryError("no memory for a second copy")

    receiver._to_prepare = fail
    with pytest.raises(ReceiverRefused, match="prepare: MemoryError: no memory for a second copy"):
        receiver.obey({"op": "prepare", "version": 0})
    assert receiver.version == 0


def test_an_error_that_nobody_expects_is_an_answer_too(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*, shards: int) -> str:
        raise MemoryError("no room")

    monkeypatch.setattr(receiver.mirror, "checksum", fail)
    answer = receiver._answer([zmq.Frame(pack({"op": "state", "id": 7, "shards": 2, "again": True}))])
    assert answer == {"id": 7, "ok": False, "worker": 0, "version": None, "error": "MemoryError: no room"}
    assert receiver.version is None


def test_only_loopback(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(ValueError, match="only loopback"):
        Receiver(Mirror.load(tmp_path), address="tcp://10.0.0.1:1", token="t", worker=0)


def test_a_tied_head_is_not_part_of_the_mirror(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"lm_head.weight": torch.ones(2, 3), "w": torch.ones(4)}, tmp_path / "model.safetensors")
    assert Mirror.load(tmp_path).layout.names == ("lm_head.weight", "w")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert Mirror.load(tmp_path).layout.names == ("w",)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        Mirror.load(tmp_path)
