"""The whole way of a version, from a learner's shards to the tokens of a real vLLM server."""

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

PROMPTS = [[1, 5, 9, 20, 40], [1, 100, 101, 102], [1, 7]]


def train(learner: Learner) -> None:
    """A step large enough for the log-probs to tell versions apart."""
    for tensor in learner.tensors.values():
        at = torch.rand(tensor.shape, generator=learner.generator) < 0.3
        noise = 0.25 * torch.randn(tensor.shape, generator=learner.generator) * tensor.float().std()
        tensor.copy_(torch.where(at, tensor + noise.to(torch.bfloat16), tensor))


async def fixed_logprobs(engine: Engine) -> list[np.ndarray]:
    answers = []
    for prompt in PROMPTS:
        [answer] = await engine.generate(prompt, {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True})
        answers += [answer.token_ids, answer.logprobs]
    return answers


@torch.no_grad()
def teacher_forced(model: torch.nn.Module, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    logprobs = model(ids).logits[0].log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.trio
@pytest.mark.timeout(300)
async def test_vllm_serves_each_published_version(tiny_engine: TinyServer, tmp_path: Path) -> None:
    tensors = load_file(tiny_engine.model_path / "model.safetensors")
    original = {name: tensor.clone() for name, tensor in tensors.items()}
    learner = Learner(tensors, ranks=2)
    saved: dict[int, Path] = {}

    def save(version: int) -> None:
        saved[version] = tmp_path / f"v{version}"
        shutil.copytree(tiny_engine.model_path, saved[version])
        save_file({n: t.clone() for n, t in tensors.items()}, saved[version] / "model.safetensors", {"format": "pt"})

    publisher = Publisher(
        address="tcp://127.0.0.1:0", layout=learner.layout, channel="collective", deadline_seconds=60.0
    )
    events: list[dict[str, Any]] = []
    active: list[int] = []
    answers: list[tuple[list[int], Completion]] = []
    save(0)
    async with trio.open_nursery() as nursery, attach_engine(tiny_engine.url) as engine:
        await nursery.start(publisher.serve)
        await publisher.publish(version=0, parent=None, blobs=learner.blobs(anchor=True))
        before = await fixed_logprobs(engine)
        await nursery.start(
            partial(
                follow_weights,
                config=Config(weights=Weights(address=publisher.address, deadline_seconds=60.0)),
                actor="actor-0",
                engine=engine,
                report=lambda kind, **fields: events.append({"kind": kind, **fields}),
                on_active=active.append,
            )
        )
        assert active == [0]
        assert await engine.current_label() == "0"
        checksums = []

        async def ask(prompt: list[int]) -> None:
            while active[-1] < 3:
                sampling = {"temperature": 1.0, "max_tokens": 480, "n": 2, "ignore_eos": True}
                answers.extend((prompt, completion) for completion in await engine.generate(prompt, sampling))

        with trio.fail_after(120):
            async with trio.open_nursery() as requests:
                for prompt in PROMPTS:
                    requests.start_soon(ask, prompt)
                for version in (1, 2, 3):
                    await trio.sleep(0.5)
                    train(learner)
                    save(version)
                    report = await publisher.publish(version=version, parent=version - 1, blobs=learner.blobs())
                    assert report.members == ("actor-0",)
                    assert report.channel == "collective"
                    checksums.append(report.checksum)
                    while active[-1] != version:
                        await trio.sleep(0.01)
                    assert await engine.current_label() == str(version)
        after = await fixed_logprobs(engine)

        for name, tensor in original.items():
            tensors[name].copy_(tensor)
        await publisher.publish(version=4, parent=3, blobs=learner.blobs())
        while active[-1] != 4:
            await trio.sleep(0.01)
        back = await fixed_logprobs(engine)
        nursery.cancel_scope.cancel()

    activations = [event for event in events if event["kind"] == "activation"]
    assert [event["version"] for event in activations] == [0, 1, 2, 3, 4]
    assert [event["checksum"] for event in activations[1:4]] == checksums
    assert {event["kind"] for event in events} == {"activation"}
    for got, want in zip(back, before, strict=True):
        np.testing.assert_array_equal(got, want)

    spans = [completion.versions for _, completion in answers]
    assert all((np.diff(versions) >= 0).all() for versions in spans)
    assert any(len(np.unique(versions)) > 1 for versions in spans)
    assert {int(v) for versions in spans for v in versions} >= {0, 1, 2}
    from transformers import LlamaForCausalLM

    models = {v: LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32) for v, folder in saved.items()}
    right, wrong = [], []
    for prompt, completion in answers:
        forced = {v: teacher_forced(model, prompt, completion.token_ids) for v, model in models.items()}
        for version in np.unique(completion.versions):
            at = completion.versions == version
            right.append(np.abs(completion.logprobs - forced[version])[at])
            wrong += [np.abs(completion.logprobs - forced[v])[at] for v in saved if v != version]
    assert np.concatenate(right).mean() < 0.05
    assert np.quantile(np.concatenate(right), 0.999) < 0.5
    assert np.concatenate(wrong).mean() > 0.3

    mirror = Mirror.load(saved[3])
    assert mirror.checksum(shards=2) == checksums[-1]
    with serve_tiny(saved[3], tmp_path) as fresh:
        async with attach_engine(fresh.url) as engine:
            expected = await fixed_logprobs(engine)
    for got, want in zip(after, expected, strict=True):
        np.testing.assert_array_equal(got, want)
