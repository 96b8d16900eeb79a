from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lachesis_configs.load import ConfigError, load_config
from lachesis_configs.schema import PROXIMALS, Correction, Learner
from lachesis_learner.corrections import CORRECTIONS, resolve_proximal

logprob = st.floats(-30, 0, width=32)
advantage = st.one_of(st.just(0.0), st.floats(-5, 5, width=32))
tokens = st.lists(
    st.fixed_dictionaries({"pi": logprob, "prox": logprob, "mu": logprob, "a": advantage, "s": st.integers(0, 256)}),
    max_size=12,
)
# Log-probs that are equal or near each other, where nothing is clipped.
near = st.builds(
    lambda base, moves, a: {"pi": base + moves[0], "prox": base + moves[1], "mu": base, "a": a, "s": 1},
    st.floats(-10, -1, width=32),
    st.tuples(st.floats(-0.5, 0.5, width=16), st.floats(-0.5, 0.5, width=16)),
    advantage,
)


def column(rows, key):
    return torch.tensor([row[key] for row in rows], dtype=torch.float32)


def evaluate(name, rows, constants=None):
    pi = column(rows, "pi").requires_grad_()
    staleness = torch.tensor([row["s"] for row in rows], dtype=torch.int64)
    sequences = torch.arange(len(rows))
    loss, masks = CORRECTIONS[name](
        pi,
        column(rows, "prox"),
        column(rows, "mu"),
        column(rows, "a"),
        staleness,
        sequences,
        constants or Correction(name=name),
    )
    loss.sum().backward()
    return loss.detach().numpy(), pi.grad.numpy(), masks["clipped"].numpy()


def as_float32(rows):
    return [{key: float(np.float32(value)) for key, value in row.items() if key != "s"} for row in rows]


def near_an_edge(row):
    """Whether float32 and float64 may disagree about a threshold."""
    r, b = row["pi"] - row["prox"], row["prox"] - row["mu"]
    moved = math.exp(row["pi"]) - math.exp(row["mu"])
    edges = (r - math.log(0.8), r - math.log(1.28), b - math.log(5), abs(moved) - 0.2)
    return min(abs(edge) for edge in edges) < 1e-5


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@given(rows=st.one_of(tokens, st.lists(near, max_size=12)))
@settings(max_examples=80, deadline=None)
def test_loss_gradient_and_mask_equal_the_reference(name, rows):
    exact = as_float32(rows)
    assume(not any(map(near_an_edge, exact)))
    loss, gradient, clipped = evaluate(name, rows)
    expected = [reference.token(name, **row) for row in exact]
    np.testing.assert_allclose(loss, [e[0] for e in expected], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, [e[1] for e in expected], rtol=2e-5, atol=1e-6)
    assert clipped.tolist() == [e[2] for e in expected]


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@given(row=near)
@settings(max_examples=30, deadline=None)
def test_the_reference_slope_is_the_finite_difference(name, row):
    exact = as_float32([row])[0]
    step = 1e-6

    def at(move):
        return reference.token(name, **{**exact, "pi": exact["pi"] + move})

    assume(at(-step)[2] == at(step)[2])
    slope = (at(step)[0] - at(-step)[0]) / (2 * step)
    assert slope == pytest.approx(at(0)[1], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@given(base=st.floats(-20, 0, width=32), a=advantage)
@settings(max_examples=30, deadline=None)
def test_on_policy_every_correction_has_the_plain_policy_gradient(name, base, a):
    _, gradient, clipped = evaluate(name, [{"pi": base, "prox": base, "mu": base, "a": a, "s": 0}])
    assert gradient[0] == np.float32(-a)
    assert not clipped[0]


@pytest.mark.parametrize("name", ["ppo", "tis", "decoupled", "dppo"])
def test_a_ratio_that_would_overflow_is_cut_and_not_nan(name):
    _, gradient, clipped = evaluate(name, [{"pi": 0.0, "prox": -200.0, "mu": -200.0, "a": 1.0, "s": 3}])
    assert clipped[0]
    kappa_term = 2 * 1e-3 * 200 if name == "dppo" else 0.0
    assert gradient[0] == pytest.approx(kappa_term)


def test_constants_come_from_the_config():
    rows = [{"pi": math.log(0.9), "prox": math.log(0.5), "mu": math.log(0.1), "a": 1.0, "s": 1}]
    loss, *_ = evaluate("tis", rows, Correction(name="tis", cap=3.0, clip_high=0.5))
    assert loss[0] == pytest.approx(-3.0 * 1.5)
    loss, *_ = evaluate("decoupled", rows, Correction(name="decoupled", cap=6.0, clip_high=1.0))
    assert loss[0] == pytest.approx(-5.0 * 1.8)
    loss, *_ = evaluate("dppo", rows, Correction(name="dppo", delta=0.9, kappa=0.5))
    assert loss[0] == pytest.approx(-9.0 + 0.5 * math.log(9) ** 2)


def test_every_correction_of_the_schema_exists_and_names_its_proximals():
    assert set(CORRECTIONS) == set(PROXIMALS) == set(Correction.model_fields["name"].annotation.__args__)


@pytest.mark.parametrize(
    ("correction", "mini_batches", "proximal"),
    [
        ({"name": "none"}, 1, None),
        ({"name": "ppo"}, 1, "behaviour"),
        ({"name": "ppo", "proximal": "recompute"}, 2, "recompute"),
        ({"name": "tis"}, 1, "recompute"),
        ({"name": "decoupled"}, 1, "recompute"),
        ({"name": "dppo"}, 3, None),
    ],
)
def test_the_first_proximal_is_the_default(correction, mini_batches, proximal):
    assert resolve_proximal(Learner(correction=Correction(**correction), mini_batches=mini_batches)) == proximal


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["learner.correction.name=tis", "learner.correction.proximal=behaviour"],
            "learner.correction.proximal: value 'behaviour', expected recompute: what tis takes",
        ),
        (
            ["learner.correction.name=dppo", "learner.correction.proximal=recompute"],
            "learner.correction.proximal: value 'recompute', expected none at all: what dppo takes",
        ),
        (
            ["learner.correction.name=ppo", "learner.correction.proximal=recompute"],
            "learner.correction.proximal: value 'recompute' with ppo and learner.mini_batches 1, expected behaviour or "
            "more mini-batches: in a batch's only step the ratio is 1 and nothing is ever clipped",
        ),
        (
            ["learner.correction.cap=3.0"],
            "learner.correction.cap: value 3.0, expected none: ppo has no cap (tis and decoupled have)",
        ),
    ],
)
def test_what_would_do_nothing_is_a_config_error(overrides, line, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.lines == (line,)
