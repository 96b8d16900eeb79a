"""Groups of the collective channel, each rank a process of its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import subprocess, sys
import numpy as np
from lachesis_transport.weights.collective import Group, GroupSpec, open_store

rank = int(sys.argv[1])
store = open_store(seconds=60) if rank == 0 else None
port = store.port if store else int(sys.argv[2])
other = subprocess.Popen([sys.executable, "-c", sys.argv[3], "1", str(port)]) if rank == 0 else None
spec = GroupSpec(epoch=1, port=port, prefix="x/1", rank=rank, size=2, backend="gloo")
group = Group(spec, seconds=60, store=store)
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
