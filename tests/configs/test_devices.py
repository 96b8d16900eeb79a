from __future__ import annotations

import pytest

from lachesis_configs import devices
from lachesis_configs.devices import check_actor_devices, check_learner_devices
from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config


@pytest.fixture
def found(monkeypatch):
    """Sets the devices that torch finds; returns the CUDA_VISIBLE_DEVICES under which it was asked."""

    def install(number, visible=None):
        asked = []
        monkeypatch.setattr(devices, "count_devices", lambda under: asked.append(under) or number)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return asked

    return install


@pytest.mark.parametrize(
    ("number", "learner", "line"),
    [
        (0, {"device": "cuda"}, "learner.device: value 'cuda', but torch finds no CUDA device"),
        (0, {"gpus": [0]}, "learner.gpus: value [0], expected none: torch finds no CUDA devices on this node"),
        (2, {"gpus": [2]}, "learner.gpus: value [2], expected numbers below 2: torch finds 2 CUDA devices"),
        (2, {"ranks": 3}, "learner.ranks: value 3, expected at most 2: torch finds that many CUDA devices"),
        (2, {"ranks": 3, "device": "cuda"}, "learner.ranks: value 3, expected at most 2"),
    ],
)
def test_a_learner_without_its_devices(found, number, learner, line):
    found(number)
    with pytest.raises(ConfigError) as caught:
        check_learner_devices(Config.model_validate({"learner": learner}))
    (only,) = caught.value.lines
    assert only.startswith(line)


@pytest.mark.parametrize(
    ("number", "learner", "asked"),
    [
        (0, {}, False),
        (0, {"device": "cpu", "gpus": [5]}, False),
        (0, {"ranks": 4}, True),
        (2, {"ranks": 2, "device": "cuda"}, True),
        (8, {"ranks": 2, "gpus": [6, 7]}, True),
    ],
)
def test_a_learner_that_has_what_it_needs(found, number, learner, asked):
    under = found(number, visible="1,2")
    check_learner_devices(Config.model_validate({"learner": learner}))
    assert under == (["1,2"] if asked else [])


def test_an_actor_names_devices_of_the_node(found):
    under = found(2, visible="1")
    check_actor_devices(Config.model_validate({"actor": {"gpus": [1]}}))
    check_actor_devices(Config())
    with pytest.raises(ConfigError) as caught:
        check_actor_devices(Config.model_validate({"actor": {"gpus": [0, 2]}}))
    assert caught.value.lines == (
        "actor.gpus: value [0, 2], expected numbers below 2: torch finds 2 CUDA devices on this node",
    )
    assert under == [None, None]  # each engine gets a CUDA_VISIBLE_DEVICES of its own


def test_torch_is_asked_in_a_process_of_its_own():
    assert devices.count_devices("") == 0
