from __future__ import annotations

import json
import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lachesis_configs.schema import Correction, Learner
from lachesis_learner.batch import MicroBatch
from lachesis_learner.corrections import CORRECTIONS, resolve_proximal
from lachesis_learner.objective import NonFiniteInput, StepSums, objective

S = 256
logprob = st.floats(-30, 0, width=32)
token = st.fixed_dictionaries(
    {
        "pi": logprob,
        "prox": logprob,
        "mu": logprob,
        "a": st.one_of(st.just(0.0), st.floats(-5, 5, width=32)),
        "s": st.one_of(st.integers(0, 3), st.integers(0, S)),
        "version": st.integers(0, 2),
    }
)
sequences = st.lists(st.lists(token, min_size=1, max_size=5), max_size=5)


def flat(sequences):
    """Tokens of the sequences with their sequence's index; with one version in the sequence, one staleness."""
    return [{**t, "sequence": i} for i, rows in enumerate(sequences) for t in rows]


def micro_batch(tokens):
    order = sorted({t["sequence"] for t in tokens})

    def column(key, dtype):
        return torch.tensor([t[key] for t in tokens], dtype=dtype)

    single = [len({u["version"] for u in tokens if u["sequence"] == t["sequence"]}) == 1 for t in tokens]
    position = torch.zeros((1, 1), dtype=torch.int64)
    return MicroBatch(
        input_ids=position,
        position_ids=position,
        ends=position + 1,
        predict=torch.zeros(len(tokens), dtype=torch.int64),
        targets=torch.zeros(len(tokens), dtype=torch.int64),
        advantages=column("a", torch.float32),
        behaviour=column("mu", torch.float32),
        staleness=column("s", torch.int64),
        versions=column("version", torch.int64),
        sequences=torch.tensor([order.index(t["sequence"]) for t in tokens], dtype=torch.int64),
        single_version=torch.tensor(single, dtype=torch.bool),
        names=tuple((f"{i}:0", i) for i in order),
        tokens=len(tokens),
    )


def evaluate(tokens, learner, *, n=None, first=True, staleness_max=S):
    pi = torch.tensor([t["pi"] for t in tokens], dtype=torch.float32).requires_grad_()
    prox = torch.tensor([t["prox"] for t in tokens], dtype=torch.float32)
    loss, sums = objective(
        pi,
        torch.full((len(tokens),), 0.5),
        prox if resolve_proximal(learner) == "recompute" else None,
        micro_batch(tokens),
        trained_tokens=len(tokens) if n is None else n,
        learner=learner,
        staleness_max=staleness_max,
        first=first,
    )
    loss.backward()
    return float(loss.detach()), pi.grad.numpy(), sums


def learner_with(name, **options):
    return Learner(correction=Correction(name=name), **options)


def exact(tokens, *, behaviour_is_proximal):
    rows = [{**t, **{key: float(np.float32(t[key])) for key in ("pi", "prox", "mu", "a")}} for t in tokens]
    return [{**t, "prox": t["mu"]} for t in rows] if behaviour_is_proximal else rows


def close(found, expected, **tolerance):
    assert found.keys() >= expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert found[key] == pytest.approx(value, **tolerance), key
        elif value is None:
            assert found[key] is None, key
        else:
            assert found[key] == pytest.approx(value, **tolerance), key


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@given(sequences=sequences, decay=st.sampled_from([1.0, 0.9]))
@settings(max_examples=40, deadline=None)
def test_loss_gradient_and_metrics_equal_the_reference(name, sequences, decay):
    learner = learner_with(name, decay=decay)
    rows = exact(flat(sequences), behaviour_is_proximal=resolve_proximal(learner) != "recompute")
    for t in rows:
        r, b = t["pi"] - t["prox"], t["prox"] - t["mu"]
        moved = abs(math.exp(t["pi"]) - math.exp(t["mu"]))
        edges = (r - math.log(0.8), r - math.log(1.28), b - math.log(5), moved - 0.2)
        assume(min(map(abs, edges)) > 1e-5)
    loss, gradient, sums = evaluate(rows, learner)
    # The KL is measured where the learner was at the start of the batch: at prox if that is recomputed.
    at_start = [{**t, "pi": t["prox"]} for t in rows] if resolve_proximal(learner) == "recompute" else rows
    expected_loss, expected_gradient, metrics = reference.step(name, rows, decay=decay)
    metrics |= (
        {key: reference.measure(at_start, [False] * len(rows))[key] for key in ("mismatch_kl", "kl_by_staleness")}
        if rows
        else {}
    )
    scale = np.abs([reference.token(name, **{k: t[k] for k in ("pi", "prox", "mu", "a")})[0] for t in rows]).sum()
    assert loss == pytest.approx(expected_loss, abs=1e-5 * scale / max(len(rows), 1) + 1e-9)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=3e-5, atol=1e-7)
    found = sums.finalise()
    close(found, metrics, rel=1e-6, abs=1e-9)
    assert found["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-9) if rows else found["loss"] is None
    assert sum(found["staleness_histogram"]) == len(rows)
    json.dumps(found, allow_nan=False)


@given(sequences=sequences, cut=st.lists(st.integers(0, 2), min_size=5, max_size=5))
@settings(max_examples=40, deadline=None)
def test_splitting_over_micro_batches_and_ranks_changes_nothing(sequences, cut):
    learner = learner_with("ppo")
    rows = flat(sequences)
    loss, gradient, sums = evaluate(rows, learner)
    parts = [[t for t in rows if cut[t["sequence"]] == part] for part in range(3)]
    results = [evaluate(part, learner, n=len(rows)) for part in parts]
    assert sum(r[0] for r in results) == pytest.approx(loss, rel=1e-5, abs=1e-9)
    np.testing.assert_allclose(
        np.sort(np.concatenate([r[1] for r in results])), np.sort(gradient), rtol=1e-6, atol=1e-12
    )
    added = results[0][2] + results[1][2] + results[2][2]
    gathered = StepSums.merge([r[2].to_vector() for r in reversed(results)])
    assert gathered.to_vector().dtype == torch.float64
    for merged in (added, gathered):
        close(merged.finalise(), sums.finalise(), rel=1e-9, abs=1e-12)


def test_nothing_trained_gives_zero_and_no_metrics():
    loss, gradient, sums = evaluate([], learner_with("dppo"), staleness_max=2)
    assert loss == 0.0
    assert gradient.shape == (0,)
    assert sums.finalise() == {
        "tokens": 0,
        "sequences": 0,
        "loss": None,
        "staleness_mean": None,
        "staleness_max": None,
        "staleness_p95": None,
        "staleness_histogram": [0, 0, 0],
        "ratio_mean": None,
        "ratio_max": None,
        "clip_fraction_positive": None,
        "clip_fraction_negative": None,
        "mismatch_kl": None,
        "kl_by_staleness": {},
        "ess_ratio": None,
        "entropy": None,
    }


ONE = {"pi": -1.0, "prox": -1.0, "mu": -1.5, "a": 1.0, "s": 1, "version": 0, "sequence": 0}


def test_the_denominator_counts_masked_tokens_and_those_of_others():
    clipped = {**ONE, "pi": -0.1}
    loss, gradient, _ = evaluate([clipped, {**ONE, "pi": -1.5}], learner_with("ppo"), n=8)
    assert loss == pytest.approx((-1.28 - 1.0) / 8)
    assert gradient.tolist() == pytest.approx([0.0, -1 / 8])


def test_decay_weighs_by_staleness():
    _, gradient, _ = evaluate([{**ONE, "mu": -1.0, "s": s} for s in (0, 1, 3)], learner_with("ppo", decay=0.5), n=1)
    assert gradient.tolist() == pytest.approx([-1.0, -0.5, -0.125])


def test_mismatch_counts_fresh_sequences_of_one_version_at_the_start_of_the_batch():
    fresh = {**ONE, "s": 0, "version": 5}
    mixed = [{**fresh, "sequence": 1, "pi": -9.0}, {**ONE, "sequence": 1, "version": 4}]
    k3 = math.exp(0.5) - 1 - 0.5
    _, _, sums = evaluate([fresh, *mixed], learner_with("ppo"))
    found = sums.finalise()
    assert found["mismatch_kl"] == pytest.approx(k3)
    assert found["kl_by_staleness"]["1"] == pytest.approx(k3)
    assert found["kl_by_staleness"]["0"] == pytest.approx((k3 + math.exp(-7.5) - 1 + 7.5) / 2)
    _, _, later = evaluate([fresh, *mixed], learner_with("ppo"), first=False)
    assert later.finalise()["mismatch_kl"] is None
    assert later.finalise()["kl_by_staleness"] == {}


def test_sequence_weights_beyond_the_range_of_floats_still_have_an_ess():
    long = [{**ONE, "sequence": i, "pi": 0.0, "mu": -29.0} for i in (0, 1) for _ in range(60)]
    _, _, sums = evaluate(long, learner_with("none"))
    assert sums.finalise()["ess_ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["pi", "prox", "mu", "a"])
def test_a_non_finite_input_names_itself_and_the_trajectory(key, value):
    rows = [ONE, {**ONE, "sequence": 1}, {**ONE, "sequence": 1, key: value}]
    name = {"pi": "logprobs", "prox": "proximal", "mu": "behaviour", "a": "advantages"}[key]
    with pytest.raises(NonFiniteInput, match=rf"{name}: {value} at trained token 1 of group '1:0', trajectory 1, exp"):
        evaluate(rows, learner_with("decoupled"))


def test_a_loss_that_overflows_names_the_trajectory():
    with pytest.raises(NonFiniteInput, match=r"loss: inf at trained token 0 of group '0:0', trajectory 0"):
        evaluate([{**ONE, "mu": -100.0, "a": -1.0}], learner_with("ppo"))


def test_staleness_above_the_bound_is_refused():
    with pytest.raises(ValueError, match=r"staleness of group '0:0', trajectory 0: 3, expected at most 2"):
        evaluate([{**ONE, "s": 3}], learner_with("ppo"), staleness_max=2)


def test_a_proximal_that_is_missing_or_not_wanted_is_an_error():
    batch = micro_batch([ONE])
    values = torch.zeros(1)
    options = {"trained_tokens": 1, "staleness_max": 1, "first": True}
    with pytest.raises(ValueError, match="proximal: missing, but tis needs it"):
        objective(values, values, None, batch, learner=learner_with("tis"), **options)
    with pytest.raises(ValueError, match="proximal: given, but ppo takes none"):
        objective(values, values, values, batch, learner=learner_with("ppo"), **options)
