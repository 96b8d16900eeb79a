"""Versions in a row into a real vLLM server that is busy all the time: none is lost, mixed up or inexact.

`--versions 1000` makes it a thousand (4 minutes); fewer by default.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from tiny import TinyServer, serve_tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

from model import Learner

from lachesis_actors.engine import Completion, Engine, attach_engine
from lachesis_actors.weight_client import follow_weights
from lachesis_configs.schema import Config, Weights
from lachesis_learner.publisher import Publisher
from lachesis_transport.weights.mirror import Mirror

PROMPTS = [[1, 5, 9, 20, 40], [1, 100, 101, 102], [1, *range(30, 80)]]
FIXED = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.trio
@pytest.mark.timeout(600)
async def test_many_versions(tiny_engine: TinyServer, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    versions = request.config.getoption("--versions")
    checked = (1, versions // 4, versions // 2, 3 * versions // 4, versions)
    tensors = load_file(tiny_engine.model_path / "model.safetensors")
    original = {name: tensor.clone() for name, tensor in tensors.items()}
    learner = Learner(tensors, ranks=2)
    publisher = Publisher(
        address="tcp://127.0.0.1:0", layout=learner.layout, channel="collective", deadline_seconds=60.0
    )
    events: list[dict[str, Any]] = []
    active: list[int] = []
    moved = trio.Event()
    answers: list[tuple[int, Completion, int]] = []
    sampled: dict[int, list[Completion]] = {}
    saved: dict[int, Path] = {}
    checksums: list[str] = []

    def save(version: int) -> None:
        saved[version] = tmp_path / f"v{version}"
        shutil.copytree(tiny_engine.model_path, saved[version])
        save_file({n: t.clone() for n, t in tensors.items()}, saved[version] / "model.safetensors", {"format": "pt"})

    def on_active(version: int) -> None:
        nonlocal moved
        active.append(version)
        moved.set()
        moved = trio.Event()

    async with trio.open_nursery() as nursery, attach_engine(tiny_engine.url) as engine:
        await nursery.start(publisher.serve)
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        await nursery.start(
            partial(
                follow_weights,
                config=Config(weights=Weights(address=publisher.address, deadline_seconds=60.0)),
                actor="actor-0",
                engine=engine,
                report=lambda kind, **fields: events.append({"kind": kind, **fields}),
                on_active=on_active,
            )
        )

        async def ask(prompt: list[int]) -> None:
            while active[-1] < versions:
                first = active[-1]
                sampling = {"temperature": 1.0, "max_tokens": 40, "n": 2, "ignore_eos": True}
                answers.extend((first, answer, active[-1]) for answer in await engine.generate(prompt, sampling))

        began = trio.current_time()
        async with trio.open_nursery() as requests:
            for prompt in PROMPTS:
                requests.start_soon(ask, prompt)
            for version in range(1, versions + 1):
                learner.step()
                report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
                checksums.append(report.checksum)
                assert report.members == ("actor-0",)
                while active[-1] != version:
                    await moved.wait()
                if version in checked:
                    save(version)
                    sampled[version] = await fixed(engine)
        seconds = trio.current_time() - began
        last = await fixed(engine)
        assert await engine.current_label() == str(versions)
        for name, tensor in original.items():
            tensors[name].copy_(tensor)  # the server is shared with other tests
        await publisher.publish(version=versions + 1, parent=versions, blobs=learner.blobs())
        while active[-1] != versions + 1:
            await moved.wait()
        nursery.cancel_scope.cancel()

    # One activation a version, in order, each of the published weights, each with its label read back.
    assert {event["kind"] for event in events} == {"activation"}
    assert active == list(range(versions + 2))
    assert [event["version"] for event in events] == active
    assert [event["checksum"] for event in events[1:-1]] == checksums
    assert len(set(checksums)) == versions
    pauses = [event["pause_seconds"] for event in events[1:-1]]
    print(f"{versions / seconds:.1f} versions/s, pause {1e3 * float(np.median(pauses)):.1f} ms, {len(answers)} answers")

    # Every token is labelled with a version that was served between its request and its answer.
    assert len(answers) > 30
    for first, answer, until in answers:
        assert (np.diff(answer.versions) >= 0).all()
        assert first <= answer.versions[0]
        assert answer.versions[-1] <= until + 1  # an engine may answer before its actor has heard that it goes on
    assert sum(len(np.unique(answer.versions)) > 1 for _, answer, _ in answers) > len(answers) / 10

    errors = {
        version: [off(saved[version], *pair) for pair in zip(PROMPTS, sampled[version], strict=True)]
        for version in checked
    }
    assert max(np.mean(error) for error in errors.values()) < 0.05
    others = [off(saved[versions], *pair) for pair in zip(PROMPTS, sampled[1], strict=True)]
    assert np.mean(others) > 0.15

    assert Mirror.load(saved[versions]).checksum(shards=2) == checksums[-1]
    (tmp_path / "fresh").mkdir()
    with serve_tiny(saved[versions], tmp_path / "fresh") as fresh:
        async with attach_engine(fresh.url) as engine:
            expected = await fixed(engine)
    for got, want in zip(last, expected, strict=True):
        np.testing.assert_array_equal(got.token_ids, want.token_ids)
        np.testing.assert_array_equal(got.logprobs, want.logprobs)


async def fixed(engine: Engine) -> list[Completion]:
    return [(await engine.generate(prompt, FIXED))[0] for prompt in PROMPTS]


@torch.no_grad()
def off(folder: Path, prompt: list[int], answer: Completion) -> float:
    """Mean distance of an answer's log-probs to those of transformers in float32 under a folder's weights, nats."""
    from transformers import LlamaForCausalLM

    ids = torch.tensor([[*prompt, *answer.token_ids.tolist()]])
    logits = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0]
    forced = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return float(np.abs(forced.numpy() - answer.logprobs).mean())
