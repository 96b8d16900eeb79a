"""A real environment process on a real actor's routes and a real queue; the engine's answers and the learner are
scripted."""

from __future__ import annotations

import json
import re
import socket

import numpy as np
import pytest
import trio
from transformers import AutoTokenizer

from lachesis_actors.actor import Actor
from lachesis_actors.engine import Completion
from lachesis_configs.load import dump_config
from lachesis_configs.schema import Config
from lachesis_transport.broker import serve_queue
from lachesis_transport.consumer import open_consumer
from lachesis_transport.producer import open_producer

STEPS, BATCH, GROUP, STALENESS = 4, 3, 4, 1


class SumsEngine:
    """Answers sums after a moment: right on every second answer, and always right once it is at the last version."""

    def __init__(self, model) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.version = 0
        self.on_pause = None

    async def generate(self, prompt_ids, sampling, *, text=False):
        await trio.sleep(0.02)
        a, b = map(int, re.search(r"Calculate (\d+) \+ (\d+)", self.tokenizer.decode(prompt_ids)).groups())
        completions = []
        for i in range(sampling["n"]):
            wrong = 1 if i % 2 == 0 and self.version < STEPS else 0
            ids = [*self.tokenizer.encode(f"= {a + b + wrong}"), self.tokenizer.eos_token_id]
            completions.append(
                Completion(
                    token_ids=np.array(ids, np.int32),
                    logprobs=np.full(len(ids), -0.25 * (i + 1), np.float32),
                    versions=np.full(len(ids), self.version, np.int32),
                    finish_reason="stop",
                    pieces=("x",) * len(ids),
                )
            )
        return completions


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.trio
async def test_a_run_from_the_first_evaluation_to_the_last(tiny_model, tmp_path):
    config = Config.model_validate(
        {
            "run": {"steps": STEPS},
            "model": {"path": str(tiny_model)},
            "queue": {"address": free_address(), "batch_groups": BATCH},
            "weights": {"address": free_address()},
            "staleness": {"max": STALENESS},
            "environments": [
                {
                    "path": "arithmetic",
                    "name": "sums",
                    "workers": 4,
                    "group_size": GROUP,
                    "max_token_length": 256,
                    "options": {"eval_problems": 20, "max_new_tokens": 32},
                }
            ],
        }
    )
    config_path = tmp_path / "config.yaml"
    config_path.write_text(dump_config(config))
    engine = SumsEngine(tiny_model)
    batches = []

    async def learn(actor: Actor) -> None:
        version = 0
        for _ in range(STEPS):
            batches.append(await consumer.lease(version))
            await consumer.trained(version)
            version = await consumer.reserve(version)
            await consumer.published(version)
            engine.version = version
            actor.active(engine, version)
        await consumer.finish(version)

    with trio.fail_after(90):
        async with trio.open_nursery() as roles:
            roles.start_soon(serve_queue, config, tmp_path)
            async with open_consumer(config.queue.address, "learner", "l0") as consumer:
                assert await consumer.reserve(None) == 0
                await consumer.published(0)
                async with open_producer(config.queue.address, "actor-0", "a0") as producer:
                    actor = Actor(config=config, folder=tmp_path, name="actor-0", producer=producer)
                    async with trio.open_nursery() as nursery:
                        url = await nursery.start(actor.serve_http, 0)
                        actor.active(engine, 0)
                        nursery.start_soon(learn, actor)
                        await actor.run_environments(url, config_path=config_path)
                        nursery.cancel_scope.cancel()
                    assert actor.tickets.everything_live() == []
                    assert dict(actor.api.refused) == {}
                    assert dict(actor.gateway.refused) in ({}, {"client_gone": actor.gateway.refused["client_gone"]})

    assert [b.version for b in batches] == list(range(STEPS))
    tokenizer = engine.tokenizer
    for batch in batches:
        assert len(batch.groups) == BATCH
        for group in batch.groups:
            assert (group.environment, len(group.trajectories)) == ("sums", GROUP)
            assert [t.score for t in group.trajectories] == pytest.approx([0.2, 1.0, 0.2, 1.0])
            assert max(batch.distances[v] for v in group.versions) <= STALENESS
            for i, t in enumerate(group.trajectories):
                on = t.mask.astype(bool)
                prompt, answer = tokenizer.decode(t.tokens[~on]), tokenizer.decode(t.tokens[on])
                a, b = map(int, re.search(r"Calculate (\d+) \+ (\d+)", prompt).groups())
                assert answer == f"= {a + b + (i % 2 == 0)}<|im_end|>"
                assert t.logprobs[on].tolist() == [-0.25 * (i + 1)] * on.sum()
                assert t.finished
                assert np.sign(t.advantages[on]).tolist() == [1.0 if i % 2 else -1.0] * on.sum()

    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    evaluations = [e for e in events if e["kind"] == "evaluation"]
    assert [(e["environment"], e["version"]) for e in evaluations] == [("sums", 0), ("sums", STEPS)]
    # Greedy answers are number 0 of their request: wrong by one at first, right at the end.
    assert [e["metrics"]["accuracy"] for e in evaluations] == [0.0, 1.0]
    assert [e["metrics"]["reward"] for e in evaluations] == pytest.approx([0.2, 1.0])

    queue = json.loads((tmp_path / "queue.json").read_text())
    assert queue["groups_trained"] == STEPS * BATCH
    assert queue["bound_violations"] == 0
    assert queue["live_tickets"] == 0
    assert set(queue["tickets_voided"]) <= {"cancelled", "client_gone", "finished", "no_variance"}
