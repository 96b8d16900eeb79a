"""The script for GPUs, as it runs where there are none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BLOCKED = """
import runpy, sys
for name in ("vllm", "deepspeed", "atroposlib", "transformers"):
    sys.modules[name] = None  # an import of it fails
sys.argv = ["gpu_weights", "--parameters", "200000", "--runs", "2", "--ranks", "3"]
runpy.run_module("lachesis_bench.gpu_weights", run_name="__main__")
"""

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is tested here is a machine without a GPU")


@without_gpu
def test_without_a_gpu_it_says_so_and_checks_what_it_can() -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu_weights.py"), "--runs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("no GPU: ")
    assert "skipped: NCCL, copies to and from a GPU" in lines[0]
    assert re.fullmatch(r"999,99\d parameters in 2 shards, [\d,]+ bytes a delta", lines[1])
    assert [line for line in lines if line.startswith("exact")] == [
        "exact  the applied weights have the checksum",
        "exact  so have those of the other ranks",
        "exact  both encoders give the same bytes",
        "exact  the patched weights are the live ones",
    ]
    assert "WRONG" not in done.stdout
    timed = [row[1] for line in lines if (row := re.fullmatch(r" *\d+\.\d\d ms  (\w.*)", line))]
    assert timed == [
        "compare by torch on the host",
        "encode, compared by torch on the host",
        "encode, compared by Lachesis on the host",
        "broadcast",
        "apply on the host",
        "patch the changed weights by torch on the host",
    ]


@without_gpu
def test_it_needs_neither_vllm_nor_deepspeed() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "in 3 shards" in done.stdout


def test_impossible_sizes_are_refused() -> None:
    command = [sys.executable, "-m", "lachesis_bench.gpu_weights", "--ranks", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--ranks -1" in done.stderr
