from __future__ import annotations

import numpy as np
import pytest
import torch
from packing import VOCABULARY, model, plain_logprobs, random_batch, token_keys

from lachesis_configs.schema import Correction, Learner
from lachesis_learner import attention, policy
from lachesis_learner.attention import attention_mask
from lachesis_learner.batch import plan
from lachesis_learner.corrections import CORRECTIONS, resolve_proximal
from lachesis_learner.objective import objective
from lachesis_learner.policy import Policy

WAYS = {
    "packed": {},
    "unshared": {"share_prompts": False},
    "small passes": {"micro_batch_tokens": 24},
    "a sequence a pass": {"micro_batch_tokens": 1, "share_prompts": False},
    "three ranks": {"ranks": 3, "micro_batch_tokens": 60},
}


def passes(batch, **options):
    options = {
        "ranks": 1,
        "micro_batch_tokens": 4096,
        "mini_batches": 1,
        "share_prompts": True,
        "pad_token": 0,
        **options,
    }
    (mini_batch,) = plan(batch, **options)
    return [m for rank in mini_batch.ranks for m in rank]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_packed_logprobs_and_entropies_are_those_of_the_plain_model(kind, tied, way):
    batch = random_batch(3, vocabulary=5)
    plain = plain_logprobs(model(kind, tied=tied), batch)
    packed = Policy(model(kind, tied=tied))
    found = 0
    for m in passes(batch, **WAYS[way]):
        logprobs, entropy = packed(**m.inputs())
        assert logprobs.dtype == entropy.dtype == torch.float32
        assert not entropy.requires_grad
        expected = [[value.detach() for value in plain[key]] for key in token_keys(batch, m)]
        found += len(expected)
        torch.testing.assert_close(logprobs, torch.tensor([e[0] for e in expected]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(entropy, torch.tensor([e[1] for e in expected]), rtol=1e-4, atol=1e-5)
    assert found == len(plain)


def train(batch, name, **options):
    """Loss, sum of |L|/N and the gradient of all parameters over all passes."""
    trained = Policy(model()).to(options.pop("dtype", torch.float32))
    learner = Learner(correction=Correction(name=name), decay=0.9)
    todo = passes(batch, **options)
    n = sum(len(m.targets) for m in todo)
    total = scale = 0.0
    for m in todo:
        logprobs, entropy = trained(**m.inputs())
        proximal = logprobs.detach() - 0.1 if resolve_proximal(learner) == "recompute" else None
        loss, _ = objective(
            logprobs, entropy, proximal, m, trained_tokens=n, learner=learner, staleness_max=3, first=True
        )
        loss.backward()
        total += float(loss.detach())
        with torch.no_grad():
            anchor = m.behaviour if proximal is None else proximal
            per_token, _ = CORRECTIONS[name](
                logprobs, anchor, m.behaviour, m.advantages, m.staleness, m.sequences, learner.correction
            )
            scale += float((per_token * learner.decay**m.staleness).abs().sum()) / n
    gradient = torch.cat([p.grad.flatten() for p in trained.parameters()])
    return total, scale, gradient


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_packing_padding_passes_and_ranks_change_neither_loss_nor_gradient(name):
    batch = random_batch(5, vocabulary=6)
    loss, _, gradient = train(batch, name, **WAYS["a sequence a pass"])
    for way in WAYS:
        other, scale, moved = train(batch, name, **WAYS[way])
        assert abs(other - loss) < 1e-5 * scale, way
        assert float((moved - gradient).norm()) < 1e-5 * float(gradient.norm()), way


def test_in_bf16_packing_changes_less_than_bf16_itself():
    batch = random_batch(5, vocabulary=6)
    _, scale, exact = train(batch, "ppo")
    loss, _, gradient = train(batch, "ppo", dtype=torch.bfloat16)
    other, _, moved = train(batch, "ppo", dtype=torch.bfloat16, **WAYS["unshared"])
    assert abs(other - loss) < 2e-2 * scale
    assert float((moved - gradient).norm()) < 5e-2 * float(gradient.norm())
    assert float((moved - gradient).norm()) < 1.5 * float((gradient - exact).norm())


def test_the_order_of_groups_changes_nothing():
    batch = random_batch(6)
    turned = type(batch)(version=batch.version, groups=batch.groups[::-1], distances=batch.distances)
    loss, scale, gradient = train(batch, "ppo")
    other, _, moved = train(turned, "ppo", micro_batch_tokens=30)
    assert abs(other - loss) < 1e-5 * scale
    assert float((moved - gradient).norm()) < 1e-5 * float(gradient.norm())


def test_gradients_are_those_of_autograd_through_the_plain_model():
    batch = random_batch(7, vocabulary=5)
    plain, packed = model(), Policy(model())
    weights = dict(zip(plain_keys(batch), torch.linspace(-1, 1, len(plain_keys(batch))), strict=True))
    sum(weights[key] * value[0] for key, value in plain_logprobs(plain, batch).items()).backward()
    for m in passes(batch):
        logprobs, _ = packed(**m.inputs())
        (logprobs * torch.stack([weights[key] for key in token_keys(batch, m)])).sum().backward()
    expected = dict(plain.named_parameters())
    found = {key.removeprefix("model."): p for key, p in packed.named_parameters()}
    assert found.keys() == expected.keys()
    for key, parameter in expected.items():
        torch.testing.assert_close(found[key].grad, parameter.grad, rtol=1e-3, atol=1e-5)


def plain_keys(batch):
    return [
        (group.group_id, index, int(t))
        for group in batch.groups
        for index, tr in enumerate(group.trajectories)
        for t in np.flatnonzero(tr.mask)
    ]


@pytest.mark.parametrize(("chunk", "part"), [(VOCABULARY * 3, VOCABULARY * 2), (1, 1), (1 << 20, VOCABULARY)])
def test_chunks_change_nothing(chunk, part, monkeypatch):
    batch = random_batch(8)
    loss, scale, gradient = train(batch, "ppo")
    monkeypatch.setattr(policy, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(policy, "PART_LOGITS", part)
    other, _, moved = train(batch, "ppo")
    assert abs(other - loss) < 1e-6 * scale
    assert float((moved - gradient).norm()) < 1e-6 * float(gradient.norm())


def test_no_more_logits_than_a_chunk_exist_at_once(monkeypatch):
    monkeypatch.setattr(policy, "CHUNK_LOGITS", 4 * VOCABULARY)
    monkeypatch.setattr(policy, "PART_LOGITS", 2 * VOCABULARY)
    largest = 0

    hidden_size = model().config.hidden_size

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            nonlocal largest
            result = function(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] == VOCABULARY:
                # A product with the transposed weight looks at [hidden_size, V] first.
                largest = max(largest, 0 if result.shape[0] == hidden_size else result.shape[0])
            return result

    (m,) = passes(random_batch(9))
    assert len(m.targets) > 20
    with Watch():
        logprobs, _ = Policy(model())(**m.inputs())
        logprobs.sum().backward()
    assert largest == 4


def test_an_empty_pass_runs_forward_and_backward_through_every_parameter():
    batch = random_batch(2, groups=1, size=1)
    empty = passes(batch, ranks=2)[1]
    assert len(empty.targets) == 0
    for tied in (True, False):
        trained = Policy(model(tied=tied))
        logprobs, entropy = trained(**empty.inputs())
        assert logprobs.shape == entropy.shape == (0,)
        loss, _ = objective(
            logprobs, entropy, None, empty, trained_tokens=5, learner=Learner(), staleness_max=3, first=True
        )
        assert loss.requires_grad
        loss.backward()
        for key, parameter in trained.named_parameters():
            assert parameter.grad is not None, key
            assert not parameter.grad.any(), key


def test_without_gradients_the_logprobs_are_the_same():
    (m,) = passes(random_batch(4))
    trained = Policy(model())
    with torch.no_grad():
        fixed, _ = trained(**m.inputs())
    assert not fixed.requires_grad
    assert torch.equal(fixed, trained(**m.inputs())[0].detach())


def test_long_rows_take_the_kernel_and_short_ones_the_direct_way_to_the_same_answer(monkeypatch):
    batch = random_batch(11, vocabulary=5)
    loss, scale, gradient = train(batch, "ppo")
    monkeypatch.setattr(attention, "SHORT_ROW", 0)
    assert attention_mask(passes(batch)[0].ends).dtype == torch.bool
    other, _, moved = train(batch, "ppo")
    assert abs(other - loss) < 1e-5 * scale
    assert float((moved - gradient).norm()) < 1e-5 * float(gradient.norm())


def test_attention_mask_of_a_tree():
    ends = torch.tensor([[4, 3, 3, 4, 5]])
    seen = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert (attention_mask(ends) == 0)[0, 0].int().tolist() == seen


def test_models_with_more_than_a_plain_head_or_attention_are_refused():
    with pytest.raises(ValueError, match="expected a linear lm_head without bias"):
        Policy(model().model)
    capped = model()
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"config.final_logit_softcapping is 30.0, expected plain logits"):
        Policy(capped)
    sliding = model("qwen2")
    sliding.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="expected full attention only"):
        Policy(sliding)
