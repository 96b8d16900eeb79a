"""What a real vLLM server answers around an activation: which weights, which keys and values, which labels."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from tiny import TINY_ENGINE, TinyServer, make_tiny_model, serve_tiny, serving_all

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

from model import Learner

from lachesis_actors.engine import Completion, Engine, attach_engine
from lachesis_actors.weight_client import follow_weights
from lachesis_configs.schema import Activation, Actor, Config, KeyValues, Weights
from lachesis_learner.publisher import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.trio, pytest.mark.timeout(300)]

SEQUENCES = 4
"""That the server runs at once: further requests wait inside of it."""
PROMPT = [1, *range(40, 140)]
"""Three full blocks of the prefix cache and a piece."""
GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 380}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def moved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after a step that moves every log-prob."""
    folder = tmp_path_factory.mktemp("moved") / "model"
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for tensor in tensors.values():
        noise = 0.2 * torch.randn(tensor.shape, generator=generator) * tensor.float().std()
        tensor += noise.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def servers(model: Path, moved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TinyServer]]:
    config = TINY_ENGINE.model_copy(update={"max_num_seqs": SEQUENCES})
    with serving_all(
        serve_tiny(model, tmp_path_factory.mktemp("server"), config=config, kv="keep"),
        serve_tiny(moved, tmp_path_factory.mktemp("fresh")),
    ) as servers:
        yield servers


@pytest.fixture
def server(servers: list[TinyServer]) -> TinyServer:
    return servers[0]


@pytest.fixture
def fresh(servers: list[TinyServer]) -> TinyServer:
    """A server that was started with the moved weights."""
    return servers[1]


class Publication:
    """A learner that goes forth and back between two folders' weights, and a publisher without a channel of its own."""

    def __init__(self, model: Path, moved: Path) -> None:
        self.weights = [load_file(folder / "model.safetensors") for folder in (model, moved)]
        self.learner = Learner({name: tensor.clone() for name, tensor in self.weights[0].items()}, ranks=2)
        self.publisher = Publisher(
            address="tcp://127.0.0.1:0", layout=self.learner.layout, channel="collective", deadline_seconds=60.0
        )
        self.version = -1

    async def publish(self, which: int) -> int:
        """Publish the weights of folder 0 or 1; returns the version."""
        for name, tensor in self.learner.tensors.items():
            tensor.copy_(self.weights[which][name])
        self.version += 1
        parent = self.version - 1 if self.version else None
        blobs = self.learner.blobs(anchor=parent is None)
        await self.publisher.publish(version=self.version, parent=parent, blobs=blobs)
        return self.version


class Follower:
    """An engine that follows the publisher."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.active: list[int] = []
        self.pauses: list[float] = []

    async def reach(self, version: int) -> None:
        with trio.fail_after(60):
            while not self.active or self.active[-1] != version:
                await trio.sleep(0.01)
        assert await self.engine.current_label() == str(version)


@asynccontextmanager
async def following(
    publication: Publication, servers: Sequence[TinyServer], *, kv: KeyValues = "recompute"
) -> AsyncIterator[list[Follower]]:
    """The servers follow the publisher, from version 0 (folder 0) on, and serve folder 0 again in the end: receivers
    take a server for one that serves what it was started with."""
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        await nursery.start(publication.publisher.serve)
        await publication.publish(0)
        followers = []
        for i, server in enumerate(servers):
            follower = Follower(await stack.enter_async_context(attach_engine(server.url)))
            config = Config(
                weights=Weights(address=publication.publisher.address, deadline_seconds=60.0),
                activation=Activation(kv=kv),
                actor=Actor(engine=server.config),
            )

            def report(kind: str, *, into: Follower = follower, **fields: object) -> None:
                assert kind == "activation", (kind, fields)
                into.pauses.append(float(str(fields["pause_seconds"])))

            await nursery.start(
                partial(
                    follow_weights,
                    config=config,
                    actor=f"actor-{i}",
                    engine=follower.engine,
                    report=report,
                    on_active=follower.active.append,
                )
            )
            followers.append(follower)
        yield followers
        for follower in followers:
            follower.engine.on_pause = None
        version = await publication.publish(0)
        for follower in followers:
            await follower.reach(version)
        nursery.cancel_scope.cancel()


async def alone(engine: Engine, prompt: Sequence[int], **sampling: object) -> Completion:
    """The answer to a request that runs alone in its batch: the sums are those of any other such run, bit for bit."""
    [answer] = await engine.generate(prompt, {**GREEDY, "max_tokens": 24, **sampling})
    return answer


def assert_same(got: Completion, want: Completion) -> None:
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.logprobs, want.logprobs)


async def across(follower: Follower, publication: Publication) -> list[Completion]:
    """Answers to requests for the same prompt, sent until version 1 is active: whenever it comes, some run and others
    wait inside the server for a place."""
    answers: list[Completion] = []
    active = trio.Event()

    async def ask() -> None:
        while not active.is_set():
            answers.extend(await follower.engine.generate(PROMPT, LONG))

    async with trio.open_nursery() as nursery:
        for _ in range(2 * SEQUENCES):
            nursery.start_soon(ask)
            await trio.sleep(0.1)  # so that they do not end all at once
        await follower.reach(await publication.publish(1))
        active.set()
    return answers


@torch.no_grad()
def forced(folder: Path, completion: Completion) -> np.ndarray:
    """Log-probs of the answer under a folder's weights, all of it, computed by transformers in float32."""
    from transformers import LlamaForCausalLM

    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    logits = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0]
    of_answer = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    return of_answer.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_requests_across_an_activation(
    kv: KeyValues, server: TinyServer, fresh: TinyServer, model: Path, moved: Path
) -> None:
    publication = Publication(model, moved)
    async with (
        following(publication, [server], kv=kv) as [follower],
        attach_engine(fresh.url) as reference,
    ):
        before = await alone(follower.engine, PROMPT)
        answers = await across(follower, publication)
        after = await alone(follower.engine, PROMPT)
        want = await alone(reference, PROMPT)
        [rest] = await reference.generate(PROMPT, LONG)
    assert before.versions.tolist() == [0] * 24
    assert after.versions.tolist() == [1] * 24
    assert np.abs(before.logprobs - want.logprobs).max() > 0.1

    # A new request meets no key or value of the old weights, though its prompt was in the cache.
    assert_same(after, want)

    ran = [a for a in answers if set(a.versions.tolist()) == {0, 1}]
    waited = [a for a in answers if a.versions[0] == 1]
    assert len(ran) >= 1
    assert len(waited) >= 1
    # Nor does one that waited inside the engine meanwhile.
    for answer in waited:
        assert set(answer.versions.tolist()) == {1}
        same = int((np.cumsum(answer.token_ids != rest.token_ids) == 0).sum())
        assert same > 20
        np.testing.assert_allclose(answer.logprobs[:same], rest.logprobs[:same], atol=0.1)

    errors: dict[str, list[np.ndarray]] = {"before": [], "first after": [], "after": []}
    for answer in ran:
        assert set(answer.versions.tolist()) == {0, 1}
        assert (np.diff(answer.versions) >= 0).all()
        at = int((answer.versions == 0).sum())
        errors["before"].append(np.abs(answer.logprobs - forced(model, answer))[:at])
        later = np.abs(answer.logprobs - forced(moved, answer))
        errors["first after"].append(later[at : at + 8])
        errors["after"].append(later[at:])
    mean = {name: float(np.concatenate(values).mean()) for name, values in errors.items()}
    print(kv, mean, "pauses", follower.pauses)
    assert mean["before"] < 0.05
    if kv == "recompute":
        assert mean["after"] < 0.05
    else:
        assert mean["first after"] > 0.15  # the prefix is the old weights'


async def test_requests_that_come_during_the_pause(
    server: TinyServer, fresh: TinyServer, model: Path, moved: Path
) -> None:
    publication = Publication(model, moved)
    prompts = [[1, *range(40 + i, 140)] for i in range(6)]
    answers: dict[int, Completion] = {}
    async with (
        following(publication, [server], kv="keep") as [follower],
        attach_engine(fresh.url) as reference,
        trio.open_nursery() as nursery,
    ):
        for prompt in prompts:
            await alone(follower.engine, prompt)  # in the cache, as version 0

        async def ask(i: int) -> None:
            answers[i] = await alone(follower.engine, prompts[i])

        follower.engine.on_pause = lambda paused: [nursery.start_soon(ask, i) for i in range(6)] if paused else None
        await follower.reach(await publication.publish(1))
        with trio.fail_after(60):
            while len(answers) < len(prompts):
                await trio.sleep(0.01)
        want = [await alone(reference, prompt) for prompt in prompts]
    for i, expected in enumerate(want):
        assert answers[i].versions.tolist() == [1] * 24
        same = int((np.cumsum(answers[i].token_ids != expected.token_ids) == 0).sum())
        assert same >= 8
        np.testing.assert_allclose(answers[i].logprobs[:same], expected.logprobs[:same], atol=0.1)


async def test_engines_of_one_and_of_two_workers(
    server: TinyServer, fresh: TinyServer, model: Path, moved: Path, tmp_path: Path
) -> None:
    publication = Publication(model, moved)
    config = TINY_ENGINE.model_copy(update={"tensor_parallel": 2})
    (tmp_path / "fresh").mkdir()
    with serving_all(
        serve_tiny(model, tmp_path, config=config), serve_tiny(moved, tmp_path / "fresh", config=config)
    ) as (two, restarted):
        async with following(publication, [server, two]) as followers, attach_engine(fresh.url) as reference:
            old = [await alone(follower.engine, PROMPT) for follower in followers]
            for which in (1, 0, 1):
                version = await publication.publish(which)
                for follower in followers:
                    await follower.reach(version)
            new = [await alone(follower.engine, PROMPT) for follower in followers]
            one = await alone(reference, PROMPT)
            assert publication.publisher.members == ("actor-0", "actor-1")
        async with attach_engine(restarted.url) as engine:
            both = await alone(engine, PROMPT)
    assert_same(new[0], one)
    assert_same(new[1], both)
    assert old[1].versions.tolist() == [0] * 24
    assert new[1].versions.tolist() == [3] * 24
    assert np.abs(old[1].logprobs - both.logprobs).max() > 0.1
