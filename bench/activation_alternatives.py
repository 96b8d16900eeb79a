"""The other ways to bring new weights into an engine on a CPU, for `lachesis bench activation --long`.

vLLM multiplies with packed copies of its linear weights. Packing only the layers that changed pays where some didn't;
keeping the weights plain and patching them in place makes each step of the generation dearer. Both are timed on
SmolLM2-135M's products, in a process of their own with the threads that an engine has:

    .venv/bin/python -m lachesis_bench.activation_alternatives      # the figures, one JSON line each
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from lachesis_bench.figures import Figure

LAYERS, HIDDEN, INNER, HEADS, VOCABULARY = 30, 576, 1_536, 960, 49_152
"""Of SmolLM2-135M; HEADS are the rows of queries, keys and values together."""

SHAPES = {"qkv": (HEADS, HIDDEN), "output": (HIDDEN, HIDDEN), "up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
"""Rows and columns of a layer's products, joined as vLLM joins them."""

SHARE = 0.02
SEQUENCES = (1, 8, 16, 32)
RUNS = 15
DEADLINE_SECONDS = 300.0


def measured_apart() -> list[Figure]:
    """The figures, from another process. Raises CalledProcessError or TimeoutExpired when that fails."""
    command = [sys.executable, "-m", "lachesis_bench.activation_alternatives"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=DEADLINE_SECONDS, check=True)
    return [Figure(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith(b"{")]


@torch.no_grad()
def measure(*, layers: int = LAYERS, vocabulary: int = VOCABULARY, runs: int = RUNS) -> list[Figure]:
    """publish.repack_all, publish.repack_layer and publish.patch; publish.plain_products_N for N sequences."""
    shapes = [shape for _ in range(layers) for shape in SHAPES.values()] + [(vocabulary, HIDDEN)]
    products = [torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for rows, columns in shapes]
    one = products[: len(SHAPES)]
    whole = _median(lambda: _pack(products), runs)
    figures = [
        _seconds("publish.repack_all", whole, runs, f"to pack the {len(products)} products anew"),
        _seconds("publish.repack_layer", _median(lambda: _pack(one), runs), runs, "to pack those of one layer anew"),
    ]
    patches = []
    for product in products:
        bits = product.weight.view(torch.int16).view(-1)
        at = torch.randint(len(bits), (int(SHARE * len(bits)),)).unique()
        patches.append((bits, at, bits[at]))
    figures.append(_seconds("publish.patch", _median(lambda: _patch(patches), runs), runs, "to patch plain weights"))
    for sequences in SEQUENCES:
        inputs = {columns: torch.randn(sequences, columns, dtype=torch.bfloat16) for columns in (HIDDEN, INNER)}
        plain, packed = [], []
        for _ in range(runs + 1):  # in turns, so that both meet the same machine
            plain.append(_timed(lambda: _plain(products, inputs)))  # noqa: B023
            packed.append(_timed(lambda: _packed(products, inputs)))  # noqa: B023
        ours, theirs = statistics.median(plain[1:]), statistics.median(packed[1:])
        figures.append(
            Figure(
                figure=f"publish.plain_products_{sequences}",
                value=1e3 * ours,
                unit="ms",
                against=f"the products of a step of {sequences} sequences with packed weights",
                reference=1e3 * theirs,
                ratio=ours / theirs,
                runs=runs,
            )
        )
    return figures


def _pack(products: list[torch.nn.Linear]) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for product in products:
        dispatch_cpu_unquantized_gemm(product, remove_weight=False)


def _patch(patches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    for bits, at, values in patches:
        bits[at] = values


def _plain(products: list[torch.nn.Linear], inputs: dict[int, torch.Tensor]) -> None:
    for product in products:
        torch.nn.functional.linear(inputs[product.in_features], product.weight)


def _packed(products: list[torch.nn.Linear], inputs: dict[int, torch.Tensor]) -> None:
    for product in products:
        product.cpu_linear(inputs[product.in_features], product.weight, None)  # type: ignore[operator]


def _median(work: Callable[[], None], runs: int) -> float:
    return statistics.median([_timed(work) for _ in range(runs + 1)][1:])


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _seconds(name: str, seconds: float, runs: int, what: str) -> Figure:
    return Figure(figure=name, value=1e3 * seconds, unit="ms", against=what, runs=runs)


if __name__ == "__main__":
    for figure in measure():
        print(figure.to_json(), flush=True)
