from __future__ import annotations

import threading

import pytest
import zmq

from lachesis_deploy import status
from lachesis_deploy.status import ask_status, print_status
from lachesis_transport.messages import MessageError, pack, unpack


@pytest.fixture
def queue():
    """Starts a queue that gives one answer; returns its address."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    threads = []

    def answer(reply):
        def serve():
            sender, request = socket.recv_multipart()
            message = unpack(request)
            assert message["op"] == "status"
            socket.send_multipart([sender, pack({"id": message["id"], **reply})])

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"tcp://127.0.0.1:{port}"

    yield answer
    for thread in threads:
        thread.join(5)
    context.destroy(linger=0)


def test_prints_what_the_queue_says(queue, capsys):
    address = queue({"ok": True, "statistics": {"ready": 3, "groups_dropped": {"late": 2}, "tickets_voided": {}}})
    assert print_status(address) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ready           3",
        "groups_dropped",
        "  late  2",
        "tickets_voided",
        "  none",
    ]


def test_a_refusal_is_an_error(queue):
    with pytest.raises(MessageError, match="status: the queue answered 'no such op'"):
        ask_status(queue({"ok": False, "error": "no such op"}))


def test_no_queue_is_said_after_the_deadline(monkeypatch, capsys):
    monkeypatch.setattr(status, "ask_status", lambda address, keys: None)
    assert print_status("tcp://127.0.0.1:1") == 2
    assert capsys.readouterr().err == "lachesis status: no queue answers at tcp://127.0.0.1:1 within 5 s\n"
    assert ask_status("tcp://127.0.0.1:1", deadline_seconds=0.05) is None
