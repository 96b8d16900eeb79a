from __future__ import annotations

import os

import pytest

from lachesis_configs.cores import parse_cores, usable_cores
from lachesis_configs.load import ConfigError, load_config


def test_parse_cores():
    assert parse_cores("0") == {0}
    assert parse_cores("0-2,5") == {0, 1, 2, 5}
    for text in ("", "a", "1-", "3-1", "0,,1", "-1"):
        with pytest.raises(ValueError, match="core numbers and ranges"):
            parse_cores(text)


def test_a_core_that_is_not_there():
    usable = sorted(os.sched_getaffinity(0))
    assert usable_cores("learner.cores", str(usable[0])) == {usable[0]}
    with pytest.raises(ConfigError, match=r"learner\.cores: value '4000', expected cores of this machine \("):
        usable_cores("learner.cores", "4000")


def test_the_config_refuses_what_is_no_list_of_cores(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("{}")
    line = "actor.engine.cores: value 'all', expected core numbers and ranges such as 0, 0-1 or 0,2-3"
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["actor.engine.cores=all"])
    assert caught.value.lines == (line,)
