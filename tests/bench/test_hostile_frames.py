from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

from lachesis_bench.hostile_frames import NO_QUEUE, mutations, requests
from lachesis_transport.messages import Group, MessageError, Scores, take, unpack
from lachesis_transport.messages import pack as packed


def test_a_seed_gives_one_stream():
    first = list(islice(mutations(7), 300))
    assert list(islice(mutations(7), 300)) == first
    assert list(islice(mutations(8), 300)) != first
    assert max(map(len, first)) <= 1 << 16


def test_every_operation_of_the_protocol_takes_part():
    protocols = Path(__file__).parents[2] / "docs" / "protocols.md"
    table = protocols.read_text().split("| --- |", 1)[1].split("\n\n", 1)[0]
    documented = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")}
    assert documented <= {request["op"] for request in requests(random.Random(0), NO_QUEUE).values()}


def test_the_requests_are_valid_before_they_are_damaged():
    for request in requests(random.Random(0), NO_QUEUE).values():
        message = unpack(packed(request))
        assert take(message, "queue", str) == NO_QUEUE
        if "group" in message:
            Group.unpack(message["group"]).validate()
        if message.get("scores") is not None:
            Scores.from_wire(message["scores"])


def test_most_frames_are_refused_as_they_are_and_the_others_reach_every_operation():
    refused, operations = 0, set()
    for frame in islice(mutations(3), 3000):
        try:
            message = unpack(frame)
            operations.add(take(message, "op", str))
        except MessageError:
            refused += 1
    assert 1500 <= refused < 2400
    assert operations >= {request["op"] for request in requests(random.Random(0), NO_QUEUE).values()}
