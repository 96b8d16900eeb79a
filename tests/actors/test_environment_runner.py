from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap

import aiohttp
import httpx
import pytest
from transformers import PreTrainedTokenizerBase

from lachesis_actors import environment_runner
from lachesis_actors.environment_routes import ActorGone, ActorRefused, ActorRoutes
from lachesis_actors.environment_runner import evaluation_metrics, run_environment
from lachesis_actors.environments.arithmetic import Arithmetic, ArithmeticConfig
from lachesis_configs.load import ConfigError, dump_config
from lachesis_configs.schema import Config

sys.path.insert(0, os.path.dirname(__file__))
from fake_actor import FakeActor


@pytest.fixture(autouse=True)
def _libraries_as_they_were(monkeypatch):
    """Shims are for a process of their own: take them back here."""
    monkeypatch.setattr(aiohttp.ClientSession, "_request", aiohttp.ClientSession._request)
    for library in (httpx, pytest.importorskip("httpx2")):
        monkeypatch.setattr(library.AsyncClient, "send", library.AsyncClient.send)
        monkeypatch.setattr(library.Client, "send", library.Client.send)
    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", PreTrainedTokenizerBase.apply_chat_template)
    monkeypatch.setattr(environment_runner, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(environment_runner, "NO_ITEM_SECONDS", 0.02)


def make_config(model, *, steps=3, evaluate_every=0, **environment) -> Config:
    return Config.model_validate(
        {
            "run": {"steps": steps, "evaluate_every": evaluate_every},
            "model": {"path": str(model)},
            "queue": {"batch_groups": 4},
            "environments": [{"workers": 3, "group_size": 4, "max_token_length": 256, **environment}],
        }
    )


def run_with(actor: FakeActor, config: Config, tmp_path) -> None:
    """Run the config's environment against the fake actor, in one event loop."""

    async def main():
        async with actor.serve():
            await environment_runner._run(config, config.environments[0], actor.url, tmp_path)

    asyncio.run(asyncio.wait_for(main(), 60))


def make_arithmetic(model, *, seed: int) -> Arithmetic:
    server = Arithmetic.config_init()[1][0].model_copy(update={"model_name": str(model), "api_key": "x"})
    return Arithmetic(ArithmeticConfig(tokenizer_name=str(model), use_wandb=False, seed=seed), [server])


ARITHMETIC = {"path": "arithmetic", "options": {"max_new_tokens": 32, "eval_problems": 12}}


def test_a_run_of_the_arithmetic_environment(tiny_model, tmp_path):
    actor = FakeActor(tiny_model, steps=3, batch=4)
    run_with(actor, make_config(tiny_model, **ARITHMETIC), tmp_path)

    kinds = [kind for kind, _ in actor.log]
    assert kinds[0] == "evaluation"
    assert kinds[-1] == "evaluation"
    assert kinds.count("evaluation") == 2
    first, last = (body for kind, body in actor.log if kind == "evaluation")
    assert first["environment"] == "arithmetic"
    assert (first["version"], last["version"]) == (0, 3)
    assert first["metrics"]["accuracy"] == 1.0
    assert first["metrics"]["reward"] == 1.0
    assert first["metrics"]["finished"] == 1.0

    assert len(actor.groups) >= 12
    assert actor.most_live <= 3
    assert actor.live == set()
    assert set(actor.released.values()) <= {"scored", "cancelled"}
    assert list(actor.released.values()).count("scored") == len(actor.groups)
    assert actor.registered["group_size"] == 4

    eos = actor.tokenizer.eos_token_id
    for group in actor.groups:
        assert group["env_id"] == 7
        assert len(group["tokens"]) == 4
        # The fake is right on answers 0 and 2: 0.2 for ending with a number, 0.8 for the sum.
        assert group["scores"] == pytest.approx([1.0, 0.2, 1.0, 0.2])
        for tokens, mask, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            start = next(i for i, m in enumerate(mask) if m != -100)
            assert mask == [-100] * start + tokens[start:]
            assert logprobs == [1.0] * start + [-0.5] * (len(tokens) - start)
            assert tokens[-1] == eos
            prompt = actor.tokenizer.decode(tokens[:start])
            assert prompt.endswith("and give the final answer.<|im_end|>\n<|im_start|>assistant\n")
            a, b = map(int, re.search(r"Calculate (\d+) \+ (\d+)", prompt).groups())
            assert (31 * a + 17 * b + a * b) % 5 != 0
            assert actor.tokenizer.decode(tokens[start:-1]).startswith(f"{a} + {b} = ")

    train = [(h, b) for _, h, b in actor.requests if h["X-Lachesis-Split"] == "train"]
    evaluation = [(h, b) for _, h, b in actor.requests if h["X-Lachesis-Split"] == "eval"]
    assert len(train) + len(evaluation) == len(actor.requests)
    assert all(b["n"] == 4 and b["temperature"] == 1.0 and b["max_tokens"] == 32 for _, b in train)
    assert all(set(h) == {"X-Lachesis-Split"} and b["temperature"] == 0.0 and b["n"] == 1 for h, b in evaluation)
    assert {int(h["X-Lachesis-Ticket"]) for h, _ in train} == set(actor.released)
    # Each sum is that of its ticket's number, with the seed that every actor has.
    seed = int.from_bytes(hashlib.blake2b(b"0/arithmetic", digest_size=4).digest(), "little")
    sums = make_arithmetic(tiny_model, seed=seed)
    for headers, body in train:
        a, b = sums.problem(actor.items[int(headers["X-Lachesis-Ticket"])])
        assert f"Calculate {a} + {b} and" in actor.tokenizer.decode(body["prompt"]["prompt_token_ids"])


def test_evaluations_in_between_do_not_stop_training(tiny_model, tmp_path):
    actor = FakeActor(tiny_model, steps=6, batch=8)
    run_with(actor, make_config(tiny_model, steps=6, evaluate_every=2, **ARITHMETIC), tmp_path)
    evaluations = [at for at, (kind, _) in enumerate(actor.log) if kind == "evaluation"]
    assert 3 <= len(evaluations) <= 4  # the last may be cancelled by the end of training
    assert any(kind == "scored" for kind, _ in actor.log[evaluations[1] :])
    assert [body["version"] for kind, body in actor.log if kind == "evaluation"][-1] == 6


def write_environment(tmp_path, body: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent(
            """
            import asyncio
            import random
            import numpy as np
            from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
            from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


            class MyConfig(BaseEnvConfig):
                bonus: float = 0.0


            class Mine(BaseEnv):
                name = "mine"
                env_config_cls = MyConfig

                @classmethod
                def config_init(cls):
                    return cls.env_config_cls(total_steps=5), APIServerConfig(model_name="m", base_url="nowhere")

                async def setup(self):
                    self.n = 0
                    self.eval_metrics = []

                async def get_next_item(self):
                    self.n += 1
                    return self.n

                async def evaluate(self, *args, **kwargs):
                    self.eval_metrics.append(("eval/percent_correct", 0.25))

                async def chat(self, item, **kwargs):
                    messages = [{"role": "user", "content": f"{item} + 1"}]
                    answer = await self.server.chat_completion(messages=messages, max_tokens=8, **kwargs)
                    return messages, answer.choices

            """
        )
        + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return str(path)


STOCK = """
async def collect_trajectory(self, item):
    messages, choices = await self.chat(item)
    chat = messages + [{"role": "assistant", "content": choices[0].message.content}]
    out = tokenize_for_trainer(self.tokenizer, chat)
    return {"tokens": out["tokens"], "masks": out["masks"], "scores": np.float32(1.0 + self.config.bonus)}, []
"""


def test_a_stock_environment_of_single_chat_completions(tiny_model, tmp_path):
    path = write_environment(tmp_path, STOCK)
    actor = FakeActor(tiny_model, steps=2, batch=4)
    config = make_config(tiny_model, steps=2, path=path, name="mine", options={"bonus": 0.5})
    run_with(actor, config, tmp_path)
    assert {kind for kind, _, _ in actor.requests} == {"chat"}
    assert all(h["X-Lachesis-Split"] == "train" and int(h["X-Lachesis-Ticket"]) for _, h, _ in actor.requests)
    # Four requests, one an answer, under one ticket; equal scores do not drop the group here.
    by_ticket = [h["X-Lachesis-Ticket"] for _, h, _ in actor.requests]
    scored = [str(t) for kind, t in actor.log if kind == "scored"]
    assert all(by_ticket.count(t) == 4 for t in scored)
    for group in actor.groups:
        assert group["scores"] == [1.5] * 4
        text = actor.tokenizer.decode(group["tokens"][0])
        assert text.startswith("<|im_start|>user\n")
        trained = [t for t, m in zip(group["tokens"][0], group["masks"][0], strict=True) if m != -100]
        assert " = " in actor.tokenizer.decode(trained)
        assert "<|im_start|>" not in actor.tokenizer.decode(trained)
    (first, last) = (body for kind, body in actor.log if kind == "evaluation")
    assert first["metrics"] == last["metrics"] == {"accuracy": 0.25, "eval/percent_correct": 0.25}


MIXED = """
async def collect_trajectories(self, item):
    if item % 3 == 1:
        raise RuntimeError("broken item")
    if item % 3 == 2:
        return None, []
    ids = self.tokenizer.encode("1 2 3 4")
    return {"tokens": [ids] * 4, "masks": [[-100] + ids[1:]] * 4, "scores": [0.0, 1.0, 0.0, 1.0]}, []
"""


def test_every_ticket_is_released_with_what_became_of_its_group(tiny_model, tmp_path):
    path = write_environment(tmp_path, MIXED)
    actor = FakeActor(tiny_model, steps=1, batch=4)
    run_with(actor, make_config(tiny_model, steps=1, path=f"{path}:Mine", name="mine", workers=1), tmp_path)
    reasons = [actor.released[t] for t in sorted(actor.released)]
    assert reasons[:6] == ["failed", "dropped_by_environment", "scored"] * 2
    assert reasons.count("scored") == 4
    assert actor.live == set()


COUNTING = """
drawn = []

async def setup(self):
    self.train = list(range(50))
    random.shuffle(self.train)
    self.iter = 0
    self.eval_metrics = []

async def get_next_item(self):
    self.drawn.append((self.iter, self.train[self.iter % 50], random.random()))
    self.iter += 1
    return self.drawn[-1][1]

async def collect_trajectories(self, item):
    ids = self.tokenizer.encode("1 2 3 4")
    return {"tokens": [ids] * 4, "masks": [[-100] + ids[1:]] * 4, "scores": [0.0, 1.0, 0.0, 1.0]}, []
"""


def test_a_stock_environment_that_counts_takes_the_items_of_its_tickets_in_an_order_that_actors_share(
    tiny_model, tmp_path
):
    config = make_config(tiny_model, steps=2, path=write_environment(tmp_path, COUNTING), name="mine")
    drawn = []
    for name in ("actor-0", "actor-1"):
        actor = FakeActor(tiny_model, name=name, steps=2, batch=4)
        actor.returned = [70, 7]  # numbers that other tickets gave back
        run_with(actor, config, tmp_path)
        drawn.append(sys.modules["mine"].Mine.drawn)
        assert [number for number, *_ in drawn[-1]] == [actor.items[ticket] for ticket in sorted(actor.items)]
        assert [number for number, *_ in drawn[-1]][:4] == [70, 7, 0, 1]
    first, second = drawn
    assert first is not second
    assert [item for _, item, _ in first][:8] == [item for _, item, _ in second][:8]
    assert [draw for *_, draw in first][:8] != [draw for *_, draw in second][:8]


NAMING = """
asked = []

async def item(self, number):
    self.asked.append(number)
    return None if self.asked == [0] else number + 1

async def get_next_item(self):
    raise AssertionError("it can name its items")

async def collect_trajectories(self, item):
    ids = self.tokenizer.encode("1 2 3 4")
    return {"tokens": [ids] * 4, "masks": [[-100] + ids[1:]] * 4, "scores": [0.0, 1.0, 0.0, 1.0]}, []
"""


def test_the_ticket_of_an_item_that_is_not_there_now_is_handed_back(tiny_model, tmp_path):
    path = write_environment(tmp_path, NAMING)
    actor = FakeActor(tiny_model, steps=1, batch=4)
    run_with(actor, make_config(tiny_model, steps=1, path=path, name="mine", workers=1), tmp_path)
    assert actor.released == {1: "no_item", 2: "scored", 3: "scored", 4: "scored", 5: "scored"}
    assert actor.items == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    assert sys.modules["mine"].Mine.asked == [0, 0, 1, 2, 3]


def test_an_environment_whose_items_fail_hands_back_its_ticket_and_ends(tiny_model, tmp_path):
    path = write_environment(tmp_path, "def item(self, number):\n    raise KeyError('no data')")
    actor = FakeActor(tiny_model, steps=1, batch=4)
    with pytest.raises(KeyError, match="no data"):
        run_with(actor, make_config(tiny_model, steps=1, path=path, name="mine"), tmp_path)
    assert actor.released == {1: "failed"}
    assert actor.live == set()


def test_an_actor_that_is_away_for_a_while_is_waited_for(tiny_model, tmp_path):
    actor = FakeActor(tiny_model, steps=2, batch=4)
    actor.fail_next = 3
    actor.version = None

    async def later():
        await asyncio.sleep(1.0)
        actor.version = 0
        while not actor.groups:
            await asyncio.sleep(0.01)
        actor.fail_next = 4

    async def main():
        config = make_config(tiny_model, steps=2, **ARITHMETIC)
        async with actor.serve(), asyncio.TaskGroup() as group:
            group.create_task(later())
            await environment_runner._run(config, config.environments[0], actor.url, tmp_path)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(actor.groups) >= 8
    assert actor.live == set()


def test_an_actor_that_stays_away_and_one_that_refuses(tiny_model):
    async def main():
        async with ActorRoutes("http://127.0.0.1:9", away_seconds=0.3) as routes:
            with pytest.raises(ActorGone, match=r"the actor at http://127\.0\.0\.1:9 was away for 0\.3 s"):
                await routes.state()

    asyncio.run(main())

    async def refused():
        actor = FakeActor(tiny_model)
        async with actor.serve(), ActorRoutes(actor.url) as routes:
            with pytest.raises(ActorRefused, match=r"POST /scored_data: 409 .*not live"):
                await routes.scored({"group_overrides": {"lachesis_ticket": 5}})

    asyncio.run(refused())


@pytest.mark.slow
def test_sigterm_hands_back_the_tickets_and_ends_with_0(tiny_model, tmp_path):
    config = make_config(tiny_model, **ARITHMETIC)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))

    async def main():
        actor = FakeActor(tiny_model, steps=3, batch=4)
        actor.hold_training = True
        async with actor.serve():
            command = ("-m", "lachesis", "environment", str(path), "--name", "arithmetic", "--url", actor.url)
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, "--folder", str(tmp_path), stderr=subprocess.PIPE
            )
            try:
                while len(actor.live) < 3:
                    await asyncio.sleep(0.02)
                    assert process.returncode is None
                await asyncio.sleep(0.3)
                live = set(actor.live)
                process.send_signal(signal.SIGTERM)
                _, errors = await asyncio.wait_for(process.communicate(), 10)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0, errors.decode()
            assert actor.live == set()
            assert {actor.released[t] for t in live} == {"cancelled"}
            assert b"stopped by SIGTERM" in errors

    asyncio.run(asyncio.wait_for(main(), 90))


def test_run_environment_returns_1_when_the_actor_never_answers(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(ActorRoutes.__init__, "__kwdefaults__", {"away_seconds": 0.2})
    config = make_config(tiny_model)
    assert run_environment(config, config.environments[0], "http://127.0.0.1:9", tmp_path) == 1


def test_a_mistake_in_the_options_is_a_config_error(tiny_model, tmp_path):
    actor = FakeActor(tiny_model)
    config = make_config(tiny_model, path="arithmetic", options={"max_valeu": 3, "group_size": 2})
    with pytest.raises(ConfigError) as caught:
        run_with(actor, config, tmp_path)
    assert caught.value.lines == (
        "environments.0.options.max_valeu: value 3, unknown key, did you mean max_value?",
        "environments.0.options.group_size: value 2, expected nothing: Lachesis decides it; set "
        "environments.0.group_size",
    )


@pytest.mark.parametrize(
    ("answer", "logged", "appended", "expected"),
    [
        ({"accuracy": 0.5, "note": "x", "bad": float("nan")}, {}, [], {"accuracy": 0.5}),
        (None, {"eval/percent_correct": 0.5}, [], {"accuracy": 0.5, "eval/percent_correct": 0.5}),
        (None, {}, [("eval/acc", 1), "junk"], {"accuracy": 1.0, "eval/acc": 1.0}),
        (None, {"b": 1, "eval/score": 2}, [("b", 0)], {"accuracy": 2.0, "b": 1.0, "eval/score": 2.0}),
        ({"loss": 1.0}, {}, [], {"loss": 1.0}),
        (None, {}, [], {}),
    ],
)
def test_evaluation_metrics(answer, logged, appended, expected):
    assert evaluation_metrics(answer, logged, appended) == expected
