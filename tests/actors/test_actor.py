from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
import trio
from tiny import TINY_ENGINE

from lachesis_actors import actor as actor_module
from lachesis_actors.actor import Actor, ActorError, actor_gpus, engine_seed, run_actor
from lachesis_actors.engine import Completion, attach_engine
from lachesis_configs.schema import Config
from lachesis_transport.broker import serve_queue
from lachesis_transport.consumer import open_consumer
from lachesis_transport.messages import Scores
from lachesis_transport.producer import open_producer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_config(**changes) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test", "steps": 2},
            "queue": {"address": f"tcp://127.0.0.1:{free_port()}", "batch_groups": 1},
            "weights": {"address": f"tcp://127.0.0.1:{free_port()}"},
            "actor": {"engine": TINY_ENGINE.model_dump()},
            "environments": [{"name": "sums", "group_size": 2}],
            **changes,
        }
    )


def test_gpus_and_seeds_of_each_actor():
    config = make_config(actor={"gpus": [2, 3, 4, 5], "engine": {"tensor_parallel": 2}})
    assert actor_gpus(config, 0) == [2, 3]
    assert actor_gpus(config, 1) == [4, 5]
    with pytest.raises(ActorError, match=r"actor\.gpus"):
        actor_gpus(config, 2)
    assert actor_gpus(make_config(), 7) is None
    assert engine_seed(config, 0) == config.run.seed
    assert len({engine_seed(config, i) for i in range(4)}) == 4


class FakeEngine:
    """Samples two answers that differ."""

    def __init__(self) -> None:
        self.on_pause = None
        self.version = 0
        self.gate: trio.Event | None = None
        self.aborted = 0

    async def render_chat(self, request):
        return [10, 11]

    async def generate(self, prompt_ids, sampling, *, text=False):
        try:
            if self.gate is not None:
                await self.gate.wait()
        except trio.Cancelled:
            self.aborted += 1
            raise
        return [
            Completion(
                token_ids=np.array([20 + i, 2], np.int32),
                logprobs=np.full(2, -0.5, np.float32),
                versions=np.full(2, self.version, np.int32),
                finish_reason="stop",
                text=f"answer {i}",
            )
            for i in range(sampling.get("n", 1))
        ]


@asynccontextmanager
async def run_queue(config, folder):
    """The real queue, with a learner that has published version 0."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_queue, config, folder)
        async with open_consumer(config.queue.address, "learner", "l0") as consumer:
            assert await consumer.reserve(None) == 0
            await consumer.published(0)
            yield consumer
        nursery.cancel_scope.cancel()


def group_body(ticket: int, scores=(1.0, 0.0)) -> dict:
    return {
        "tokens": [[10, 11, 20, 2], [10, 11, 21, 2]],
        "masks": [[-100, -100, 20, 2], [-100, -100, 21, 2]],
        "scores": list(scores),
        "group_overrides": {"lachesis_ticket": ticket},
    }


@pytest.mark.trio
async def test_a_group_goes_from_http_to_the_learner(tmp_path):
    config = make_config()
    with trio.fail_after(30):
        async with run_queue(config, tmp_path) as consumer, trio.open_nursery() as nursery:
            async with open_producer(config.queue.address, "actor-0", "a0") as producer:
                actor = Actor(config=config, folder=tmp_path, name="actor-0", producer=producer)
                engine = FakeEngine()
                url = await nursery.start(actor.serve_http, 0)
                actor.active(engine, 0)
                async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                    ticket = (await client.post("/lachesis/ticket", json={"environment": "sums"})).json()["ticket"]
                    chat = {"messages": [{"role": "user", "content": "x"}], "n": 2}
                    headers = {"X-Lachesis-Ticket": str(ticket)}
                    answer = await client.post("/v1/chat/completions", json=chat, headers=headers)
                    assert [c["message"]["content"] for c in answer.json()["choices"]] == ["answer 0", "answer 1"]
                    posted = await client.post("/scored_data", json=group_body(ticket))
                    assert posted.json() == {"status": "received", "group": f"{ticket}:0", "put": "accepted"}
                    batch = await consumer.lease(0)
                    assert [g.group_id for g in batch.groups] == [f"{ticket}:0"]
                    assert batch.groups[0].trajectories[0].versions.tolist() == [-1, -1, 0, 0]
                    assert batch.scores == Scores(groups=1, sequences=2, total=1.0, squares=1.0)

                    # a ticket that nobody scores comes back when the actor stops
                    second = (await client.post("/lachesis/ticket", json={"environment": "sums"})).json()["ticket"]
                    assert actor.tickets.everything_live() == [second]
                    await actor.hand_back()
                    assert actor.tickets.everything_live() == []
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_client_that_hangs_up_aborts_its_request(tmp_path):
    config = make_config()
    with trio.fail_after(30):
        async with run_queue(config, tmp_path), trio.open_nursery() as nursery:
            async with open_producer(config.queue.address, "actor-0", "a0") as producer:
                actor = Actor(config=config, folder=tmp_path, name="actor-0", producer=producer)
                engine = FakeEngine()
                engine.gate = trio.Event()
                url = await nursery.start(actor.serve_http, 0)
                actor.active(engine, 0)
                async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                    with trio.move_on_after(0.2):
                        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
                while engine.aborted == 0:
                    await trio.sleep(0.01)
                while actor.activity.requests:
                    await trio.sleep(0.01)

                # and one that hangs up while it waits for a ticket leaves none behind
                actor.api.version = None
                actor.api._opened = trio.Event()
                async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                    with trio.move_on_after(0.2):
                        await client.post("/lachesis/ticket", json={"environment": "sums"})
                actor.api.serve(0)
                await trio.sleep(0.2)
                assert actor.tickets.everything_live() == []
            nursery.cancel_scope.cancel()


async def fake_weights(*, config, actor, engine, report, on_active, task_status):
    on_active(0)
    task_status.started()
    await trio.sleep_forever()


@asynccontextmanager
async def fake_engine(*args, **kwargs):
    yield FakeEngine()


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """run_actor with an engine and published weights that aren't there; environments are small scripts."""
    monkeypatch.setattr(actor_module, "open_engine", fake_engine)
    monkeypatch.setattr(actor_module, "follow_weights", fake_weights)
    monkeypatch.setattr(actor_module, "resolve_model", lambda name: tmp_path)

    def script(text: str) -> None:
        def command(environment, *, url, config_path, folder):
            assert config_path.exists()
            return [sys.executable, "-I", "-S", "-c", text, url]

        monkeypatch.setattr(actor_module, "environment_command", command)

    return script


@pytest.mark.trio
async def test_an_environment_that_fails_ends_the_actor_with_the_cause(fakes, tmp_path):
    fakes("print('no such task', flush=True); raise SystemExit(4)")
    config = make_config()
    with trio.fail_after(30):
        async with run_queue(config, tmp_path):
            with pytest.raises(ActorError, match=r"environment sums ended with status 4; the end of .*\nno such task"):
                await run_actor(config, tmp_path, 0)


@pytest.mark.trio
async def test_an_environment_that_ends_early_is_a_failure(fakes, tmp_path):
    fakes("")
    config = make_config()
    with trio.fail_after(30):
        async with run_queue(config, tmp_path):
            with pytest.raises(ActorError, match="environment sums ended before the run did"):
                await run_actor(config, tmp_path, 0)


@pytest.mark.trio
async def test_the_actor_ends_when_the_run_has_finished(fakes, tmp_path):
    fakes("import time; time.sleep(2.5)")
    config = make_config()
    with trio.fail_after(30):
        async with run_queue(config, tmp_path) as consumer:
            await consumer.finish(0)
            await run_actor(config, tmp_path, 0)
    assert (tmp_path / "actor-0" / "config.yaml").exists()
    assert (tmp_path / "logs" / "actor-0-sums.log").exists()


@pytest.mark.trio
async def test_sigterm_ends_the_environments_and_returns(fakes, tmp_path):
    fakes("import os, time; print('up', os.getpid(), flush=True); time.sleep(600)")
    config = make_config()
    log_path = tmp_path / "logs" / "actor-0-sums.log"
    with trio.fail_after(30):
        async with run_queue(config, tmp_path), trio.open_nursery() as nursery:
            nursery.start_soon(run_actor, config, tmp_path, 0)
            while not log_path.exists() or "up" not in log_path.read_text():
                await trio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
    pid = int(log_path.read_text().split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.trio
async def test_atroposs_own_clients_on_the_real_engine(tiny_engine, tmp_path):
    """OpenAIServer, VLLMServer with ManagedServer and the environment's side of the trajectory API, as shipped."""
    config = make_config()
    with trio.fail_after(120):
        async with run_queue(config, tmp_path) as consumer, trio.open_nursery() as nursery:
            async with (
                open_producer(config.queue.address, "actor-0", "a0") as producer,
                attach_engine(tiny_engine.url) as engine,
            ):
                await engine.label(0)
                actor = Actor(config=config, folder=tmp_path, name="actor-0", producer=producer)
                url = await nursery.start(actor.serve_http, 0)
                actor.active(engine, 0)
                model = str(tiny_engine.model_path)
                nodes = await trio.to_thread.run_sync(lambda: asyncio.run(atropos_flow(url, model)))
                batch = await consumer.lease(0)
            nursery.cancel_scope.cancel()
    (group,) = batch.groups
    assert [t.tokens.tolist() for t in group.trajectories] == [node.tokens for node in nodes]
    for trajectory, node in zip(group.trajectories, nodes, strict=True):
        on = trajectory.mask.astype(bool)
        assert trajectory.tokens[on].tolist() == [token for token in node.masked_tokens if token != -100]
        assert trajectory.logprobs[on].tolist() == pytest.approx([lp for lp in node.logprobs if lp != 1.0], abs=1e-6)
        assert set(trajectory.versions[on].tolist()) == {0}


async def atropos_flow(url: str, model: str) -> list:
    """Registers, samples two turns with n = 2, posts the group; returns the sequences that it posted."""
    import aiohttp
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from atroposlib.envs.server_handling.openai_server import OpenAIServer
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.vllm_server import VLLMServer

    server_config = APIServerConfig(
        base_url=f"{url}/v1", model_name=model, api_key="x", num_requests_for_eval=4, timeout=60
    )
    question = [{"role": "user", "content": "two plus three?"}]

    plain = OpenAIServer(server_config)
    chat = await plain._chat_completion_wrapper(
        model=model, messages=question, n=2, max_tokens=6, temperature=1.0, logprobs=True, stop=["zzz"]
    )
    assert len(chat.choices) == 2
    assert chat.choices[0].finish_reason in ("stop", "length")
    assert all(entry.logprob <= 0 for entry in chat.choices[0].logprobs.content)
    text = await plain._completion_wrapper(model=model, prompt="one two", n=2, max_tokens=3)
    assert len(text.choices) == 2

    vllm = VLLMServer(server_config)
    prompt_ids, outputs, logprobs, reasons = await vllm._tokens_and_logprobs_completion_wrapper(
        model=model, prompt="one two", n=2, max_tokens=3, temperature=0.7
    )
    assert len(outputs) == len(logprobs) == len(reasons) == 2
    assert prompt_ids == vllm.tokenizer.encode("one two")

    async with aiohttp.ClientSession() as session:

        async def call(method: str, route: str, body=None):
            async with session.request(method, url + route, json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        async with session.get(f"{url}/health") as response:
            response.raise_for_status()
        registered = await call(
            "POST",
            "/register-env",
            {
                "max_token_length": 512,
                "desired_name": None,
                "weight": 1.0,
                "min_batch_allocation": None,
                "group_size": 2,
            },
        )
        assert registered["status"] == "success"
        status = await call("GET", "/status-env", {"env_id": registered["env_id"]})
        assert status["queue_size"] == 0

        managed = ManagedServer(vllm, tokenizer=vllm.tokenizer)
        vllm.server_healthy = True
        first = await managed.chat_completion(messages=question, model=model, n=2, max_tokens=6, temperature=1.0)
        assert len(first.choices) == 2
        nodes = managed.get_state()["nodes"]
        # Without the runner there is no ticket: the group is known by its content.
        await call(
            "POST",
            "/scored_data",
            {
                "tokens": [node.tokens for node in nodes],
                "masks": [node.masked_tokens for node in nodes],
                "inference_logprobs": [node.logprobs for node in nodes],
                "scores": [1.0, 0.0],
                "env_id": registered["env_id"],
            },
        )
        return nodes


def test_the_command_of_an_environment(tmp_path):
    config = make_config()
    command = actor_module.environment_command(
        config.environments[0], url="http://127.0.0.1:1", config_path=tmp_path / "c.yaml", folder=tmp_path
    )
    assert command[1:5] == ["-m", "lachesis", "environment", str(tmp_path / "c.yaml")]
    assert subprocess.list2cmdline(command).endswith(f"--name sums --url http://127.0.0.1:1 --folder {tmp_path}")
