from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from lachesis_actors.environment_loading import load_environment, make_environment
from lachesis_actors.environments.single_turn import Answer
from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config

KEY = "environments.2.path"
HEAD = """
from atroposlib.envs.base import BaseEnv, BaseEnvConfig

class Base(BaseEnv):
    async def get_next_item(self): ...
    async def evaluate(self): ...
    async def setup(self): ...
"""


@pytest.fixture
def write(tmp_path, request):
    def write(body: str, name="env_file") -> str:
        path = tmp_path / f"{name}_{request.node.name[:40].replace('[', '_')}.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return str(path)

    return write


def message(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_environment(path, key=KEY)
    return str(caught.value)


def test_built_in_names():
    assert load_environment("arithmetic", key=KEY).__name__ == "Arithmetic"
    assert load_environment("gsm8k", key=KEY).__name__ == "Gsm8k"


def test_a_file_with_one_class_that_is_no_base_of_another(write):
    path = write("class Mine(Base): ...")
    assert load_environment(path, key=KEY).__name__ == "Mine"
    assert load_environment(f"{path}:Base", key=KEY).__name__ == "Base"


def test_a_file_may_import_its_neighbours(write, tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("WORD = 'spindle'")
    path = write("from neighbour_of_mine import WORD\nclass Mine(Base):\n    word = WORD")
    assert load_environment(path, key=KEY).word == "spindle"


def test_the_example_in_the_docs(tiny_model, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    path = tmp_path / "reverse_of_docs.py"
    path.write_text(code)
    env = make(str(path), tiny_model, tmp_path, options={"max_new_tokens": 8})
    assert [env.problem(n) for n in (0, 4, 5)] == ["spindle", "weaver", "spindle"]
    assert env.messages("thread") == [{"role": "user", "content": "Spell thread backwards."}]
    verdict = env.judge("thread", Answer(text="daerht", tokens=3, finished=True))
    assert (verdict.reward, verdict.correct) == (1.0, True)


def test_what_is_no_environment(write, tmp_path):
    two = write("class One(Base): ...\nclass Two(Base): ...")
    assert message(two) == (
        f"environments.2.path: value {two!r}, expected a file with one BaseEnv subclass; has One, Two"
    )
    assert load_environment(f"{two}:Two", key=KEY).__name__ == "Two"
    assert message(f"{two}:Three").endswith("expected the name of a BaseEnv subclass in the file")
    assert message(f"{two}:BaseEnvConfig").endswith("expected the name of a BaseEnv subclass in the file")
    assert message(str(tmp_path / "none.py")).endswith("expected a file that exists")
    assert message("arithmetics") == (
        "environments.2.path: value 'arithmetics', expected one of arithmetic, gsm8k, FILE.py or FILE.py:Class; "
        "did you mean arithmetic?"
    )
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert message(str(empty)).endswith("expected a file with one BaseEnv subclass; has none")


def make(path, model, tmp_path, **environment):
    config = Config.model_validate(
        {
            "run": {"steps": 9, "evaluate_every": 4},
            "queue": {"batch_groups": 5},
            "staleness": {"max": 3},
            "environments": [{"path": path, "name": "x", "workers": 2, "group_size": 6, **environment}],
        }
    )
    kind = load_environment(path, key=KEY)
    return make_environment(
        kind,
        config.environments[0],
        config,
        url="http://127.0.0.1:1",
        model=model,
        seed=11,
        folder=tmp_path,
    )


def test_what_lachesis_decides(tiny_model, tmp_path):
    env = make("arithmetic", tiny_model, tmp_path, options={"temperature": 0.7, "data_dir_to_save_evals": "evals"})
    c = env.config
    assert (c.group_size, c.max_num_workers, c.max_token_length, c.batch_size) == (6, 2, 512, 30)
    assert (c.rollout_server_url, c.tokenizer_name, c.use_wandb) == ("http://127.0.0.1:1", str(tiny_model), False)
    assert (c.total_steps, c.steps_per_eval, c.max_batches_offpolicy, c.worker_timeout) == (9, 4, 4, -1)
    assert (c.ensure_scores_are_not_same, c.include_messages, c.wandb_name) == (False, False, "x")
    assert (c.temperature, c.seed, c.max_value) == (0.7, 11, 20)
    assert c.data_dir_to_save_evals == str(tmp_path / "evals")
    (server,) = env.server.servers
    assert type(server).__name__ == "VLLMServer"
    assert (server.config.base_url, server.config.health_check) == ("http://127.0.0.1:1/v1", False)
    assert env.server.servers[0].config.model_name == str(tiny_model)
    assert make("arithmetic", tiny_model, tmp_path, options={"seed": 5}).config.seed == 5


def test_options_that_do_not_fit(tiny_model, tmp_path):
    with pytest.raises(ConfigError) as caught:
        make("arithmetic", tiny_model, tmp_path, options={"max_value": 1, "temperature": "hot"})
    assert caught.value.lines == (
        "environments.0.options.temperature: value 'hot', expected a valid number, unable to parse string as a number",
        "environments.0.options.max_value: value 1, expected greater than or equal to 2",
    )


def test_gsm8k_without_its_files_names_the_option(tiny_model, tmp_path):
    with pytest.raises(ConfigError) as caught:
        make("gsm8k", tiny_model, tmp_path, options={"data": str(tmp_path / "none")})
    assert caught.value.lines == (
        f"environments.0.options.data: value '{tmp_path / 'none'}', expected a folder with GSM8K's train.jsonl and "
        "test.jsonl; it has no train.jsonl",
    )
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(
        ConfigError, match=r"environments\.0\.options\.data: .*train\.jsonl, line 1: expected an object"
    ):
        make("gsm8k", tiny_model, tmp_path, options={"data": str(tmp_path)})
