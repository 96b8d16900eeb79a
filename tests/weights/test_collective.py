"""Groups of the collective channel, each rank a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from lachesis_transport.messages import MessageError
from lachesis_transport.weights.collective import CollectiveFailed, Group, GroupSpec, meet, within
from lachesis_transport.weights.rendezvous import Rendezvous

PROGRAM = """
import subprocess, sys
import numpy as np
from lachesis_transport.weights.collective import Group, GroupSpec
from lachesis_transport.weights.rendezvous import Rendezvous

rank = int(sys.argv[1])
rendezvous = Rendezvous("127.0.0.1", epoch=1) if rank == 0 else None
port = rendezvous.port if rendezvous else int(sys.argv[2])
other = subprocess.Popen([sys.executable, "-c", sys.argv[3], "1", str(port)]) if rank == 0 else None
spec = GroupSpec(epoch=1, host="127.0.0.1", port=port, rank=rank, size=2, backend="gloo")
group = Group(spec, seconds=60)
buffer = np.full(1000, 7 - 7 * rank, np.uint8)
group.broadcast(buffer, seconds=60)
assert (buffer == 7).all()
group.close()
sys.exit(other.wait() if other else 0)
"""


def test_a_process_may_end_right_after_it_left_its_group():
    for _ in range(3):
        command = [sys.executable, "-c", PROGRAM, "0", "", PROGRAM]
        assert subprocess.run(command, timeout=150, check=False).returncode == 0


LEAVING = """
import os, signal, subprocess, sys, threading, time
import numpy as np
from lachesis_transport.weights import collective
from lachesis_transport.weights.collective import Group, GroupSpec
from lachesis_transport.weights.rendezvous import Rendezvous, RendezvousStore

rank, frozen, port = map(int, sys.argv[1:4])
where = sys.argv[4]
if rank == 0:
    rendezvous = Rendezvous("127.0.0.1", epoch=1)
    port = rendezvous.port
    print(port, flush=True)

def freeze(*_):
    print("frozen", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

if rank == frozen and where == "meeting":
    RendezvousStore.get = RendezvousStore.wait = freeze

def take_part():
    group = Group(GroupSpec(epoch=1, host="127.0.0.1", port=port, rank=rank, size=2, backend="gloo"), seconds=8)
    if rank == frozen:
        freeze()
    group.broadcast(np.zeros(64 << 20, np.uint8), seconds=3)

if rank == frozen:
    take_part()
threading.Thread(target=take_part, daemon=True).start()
sys.stdin.readline()
while not collective._calls:
    time.sleep(0.01)
print("leaving", flush=True)
sys.exit(7)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("leaving", "where"),
    [(0, "nobody"), (0, "meeting"), (0, "broadcast"), (1, "broadcast"), (1, "nobody"), (0, "killed"), (1, "killed")],
)
def test_a_process_may_end_while_its_group_waits_for_a_frozen_rank(leaving: int, where: str) -> None:
    """`where`: the other rank is not there, or frozen while the ranks meet or in the broadcast, or killed then."""

    def start(rank: int, port: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", LEAVING, str(rank), str(1 - leaving), str(port), where]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        port = 1
        for rank in (0, 1):
            if where == "nobody" and rank != leaving:
                continue
            processes[rank] = start(rank, port)
            if rank == 0:
                assert processes[0].stdout is not None
                port = int(processes[0].stdout.readline())
        if where != "nobody":
            frozen = processes[1 - leaving].stdout
            assert frozen is not None
            assert frozen.readline() == b"frozen\n"
        stdin, stdout = processes[leaving].stdin, processes[leaving].stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(b"\n")
        stdin.flush()
        assert stdout.readline() == b"leaving\n"
        if where == "killed":
            processes[1 - leaving].kill()
        processes[leaving].wait(60)
        assert processes[leaving].returncode == 7
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def spec(*, rank: int = 0, size: int = 1, port: int = 1, backend: str = "gloo") -> GroupSpec:
    return GroupSpec(epoch=3, host="127.0.0.1", port=port, rank=rank, size=size, backend=backend)


def test_a_rank_whose_peers_do_not_come_gives_up_in_time():
    rendezvous = Rendezvous("127.0.0.1", epoch=3)
    with pytest.raises(CollectiveFailed, match=r"epoch 3: group not built: rendezvous: .* no answer within 0.1 s"):
        Group(spec(size=2, port=rendezvous.port), seconds=0.1)
    rendezvous.close()


def test_nccl_wants_a_gpu_by_its_index():
    for device in ("cpu", "cuda"):
        with pytest.raises(CollectiveFailed, match=f"device: {device}, expected cuda:INDEX for nccl"):
            Group(spec(backend="nccl"), seconds=1.0, device=device)


def test_two_ranks_on_one_gpu_are_named_before_nccl_meets_them():
    keys = dist.HashStore()
    for rank, gpu in ((1, "GPU-b"), (2, "GPU-a")):
        keys.set(f"here/{rank}", gpu)
    with pytest.raises(CollectiveFailed, match=r"ranks 0 and 2 are on one GPU, GPU-a.*weights.channel: stream"):
        meet(keys, spec(size=3, backend="nccl"), gpu="GPU-a")
    meet(keys, spec(size=3, backend="nccl"), gpu="GPU-c")


def test_whoever_is_missing_is_missed_before_nccl_waits_for_it():
    keys = dist.HashStore()
    keys.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError):
        meet(keys, spec(size=2, backend="nccl"), gpu="GPU-a")


def test_what_may_hang_is_left_to_itself():
    done = threading.Event()
    within(20.0, done.set, what="setting")
    assert done.is_set()
    with pytest.raises(ValueError, match="substring not found"):
        within(20.0, partial("a".index, "b"), what="searching")
    hang = threading.Event()
    with pytest.raises(CollectiveFailed, match=r"waiting took more than 0.05 s"):
        within(0.05, partial(hang.wait, 20), what="waiting")
    hang.set()


def test_an_invitation_survives_the_wire_and_is_checked():
    sent = spec(rank=1, size=2, port=5)
    assert GroupSpec.from_wire(sent.to_wire()) == sent
    for wrong in ({"rank": 2}, {"backend": "mpi"}, {"host": None}, {"port": "5"}):
        with pytest.raises(MessageError):
            GroupSpec.from_wire({**sent.to_wire(), **wrong})
