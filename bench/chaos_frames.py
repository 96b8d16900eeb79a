"""Sends malformed frames to a queue as fast as it takes them, over two sockets, and ends when it has gone through all.

python -m lachesis_bench.chaos_frames ADDRESS SEED COUNT
"""

from __future__ import annotations

import sys
from itertools import islice

import zmq

from lachesis_bench.hostile_frames import mutations
from lachesis_transport.messages import pack, unpack

SOCKETS = 2
ASK_AGAIN_MS = 1000
ASK_TIMES = 60
READ_EVERY = 32
"""Frames between two looks at the answers, which nobody wants and which must not pile up."""


def flood(address: str, seed: int, count: int) -> None:
    """Send `count` frames. Raises TimeoutError when the queue does not answer a good request afterwards."""
    with zmq.Context() as context:
        sockets = [context.socket(zmq.DEALER) for _ in range(SOCKETS)]
        try:
            for socket in sockets:
                socket.linger = 0
                socket.connect(address)
            for i, frame in enumerate(islice(mutations(seed), count)):
                socket = sockets[i % SOCKETS]
                socket.send(frame)
                if i % READ_EVERY < SOCKETS:
                    _discard_answers(socket)
            for socket in sockets:
                _await_answer(socket)
        finally:
            for socket in sockets:
                socket.close()


def _discard_answers(socket: zmq.Socket[bytes]) -> None:
    while socket.poll(0):
        socket.recv_multipart()


def _await_answer(socket: zmq.Socket[bytes]) -> None:
    """A socket's messages are answered in order: what it sent before is gone through then."""
    for _ in range(ASK_TIMES):
        socket.send(pack({"op": "status", "id": 1}))
        while socket.poll(ASK_AGAIN_MS):
            if "statistics" in unpack(socket.recv_multipart()[-1]):
                return
    raise TimeoutError(f"the queue did not answer within {ASK_TIMES * ASK_AGAIN_MS / 1000:g} s")


if __name__ == "__main__":
    flood(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
