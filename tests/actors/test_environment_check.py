from __future__ import annotations

import pytest

from lachesis_actors.environment_check import check_environments
from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config

MINE = """
from atroposlib.envs.base import BaseEnv

print("noise on stdout, without an end of line", end="")

class Mine(BaseEnv):
    async def get_next_item(self): ...
    async def evaluate(self): ...
    async def setup(self): ...
"""


def config(*environments):
    return Config.model_validate({"environments": list(environments)})


def test_every_mistake_is_named_before_anything_starts(tmp_path):
    mine, broken, ending = tmp_path / "mine.py", tmp_path / "broken.py", tmp_path / "ending.py"
    mine.write_text(MINE)
    broken.write_text("\nimport no_such_module")
    ending.write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError) as caught:
        check_environments(
            config(
                {"name": "a", "options": {"max_valeu": 3}},
                {"name": "b", "path": str(mine), "options": {"group_size": 3}},
                {"name": "c", "path": str(broken)},
                {"name": "d", "path": str(ending)},
                {"name": "e", "path": f"{mine}:Yours"},
                {"name": "f", "path": "gsm8k", "options": {"data": str(tmp_path)}},
                {"name": "g", "path": str(mine)},
            )
        )
    assert caught.value.lines == (
        "environments.0.options.max_valeu: value 3, unknown key, did you mean max_value?",
        "environments.1.options.group_size: value 3, expected nothing: Lachesis decides it; "
        "set environments.1.group_size",
        f"environments.2.path: value '{broken}', expected a file that can be imported; "
        f"ModuleNotFoundError: No module named 'no_such_module' ({broken}, line 2)",
        f"environments.3.path: value '{ending}', expected a file that can be imported; "
        f"SystemExit: 0 ({ending}, line 1)",
        f"environments.4.path: value '{mine}:Yours', expected the name of a BaseEnv subclass in the file",
        f"environments.5.options.data: value '{tmp_path}', expected a folder with GSM8K's train.jsonl and test.jsonl; "
        "it has no train.jsonl",
    )


def test_a_file_that_ends_the_process_that_imports_it_is_told_of(tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text("import os, sys\nsys.stderr.write('no driver')\nsys.stderr.flush()\nos._exit(3)")
    with pytest.raises(ConfigError, match=r"environments: .* ended with status 3 and said:\n(?s:.*)no driver"):
        check_environments(config({"path": str(path)}))
