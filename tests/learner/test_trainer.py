"""DeepSpeed ranks against a plain PyTorch loop over unpacked sequences, in fp32."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import trainer_program
from packing import model, plain_logprobs, random_batch, trained
from publishing import SMALLEST, STEPS, uneven_model
from reference import step
from trainer_program import PUBLISHED_RANKS, VARIANT_RANKS

from lachesis_learner.batch import plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    """By number of ranks: what each rank wrote."""
    folder = tmp_path_factory.mktemp("trainer")
    model().save_pretrained(folder / "model")
    uneven_model().save_pretrained(folder / "uneven")
    answer = {}
    for ranks in PUBLISHED_RANKS:
        out = folder / f"of-{ranks}"
        program = [sys.executable, trainer_program.__file__, str(folder), str(out), str(ranks)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        answer[ranks] = [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(ranks)]
    return answer


def _tokens(batch, logprobs):
    """The batch as the reference takes it, with the current log-probs as the proximal ones."""
    logprobs = {key: float(logp.detach()) for key, (logp, _) in logprobs.items()}
    return [
        {"pi": logprobs[key], "prox": logprobs[key], "mu": mu, "a": a, "s": s, "sequence": key[:2],
         "version": version}
        for key, (_, _, a, mu, s, version) in trained(batch).items()
    ]  # fmt: skip


def _reference(policy, batch, *, name="ppo", decay=1.0):
    """Loss, sum |w L| / N, and the gradient of every parameter in float64."""
    logprobs = plain_logprobs(policy, batch)
    tokens = _tokens(batch, logprobs)
    if name == "ppo":
        tokens = [{**t, "prox": t["mu"]} for t in tokens]
    loss, slopes, _ = step(name, tokens, decay=decay)
    size = sum(abs(step(name, [t], decay=decay, n=len(tokens))[0]) for t in tokens)
    policy.zero_grad()
    sum(slope * logprobs[key][0] for slope, key in zip(slopes, trained(batch), strict=True)).backward()
    return loss, size, {f"model.{n}": p.grad.clone() for n, p in policy.named_parameters()}


def _distance(left, right):
    assert left.keys() == right.keys()
    difference = sum(float((left[n].double() - right[n].double()).square().sum()) for n in left) ** 0.5
    return difference / _norm(right)


def _norm(tensors):
    return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5


@pytest.mark.parametrize("ranks", VARIANT_RANKS)
@pytest.mark.parametrize("variant", ["whole", "split", "unshared"])
def test_loss_and_gradient_are_those_of_a_plain_loop(results, ranks, variant) -> None:
    decay = trainer_program.VARIANTS[variant].get("decay", 1.0)
    loss, size, gradient = _reference(model().double(), random_batch(trainer_program.SEED), decay=decay)
    got = results[ranks][0][variant]
    assert abs(got["loss"] - loss) < 1e-5 * size
    assert _distance(got["gradient"], gradient) < 1e-5
    assert got["grad_norm"] == pytest.approx(_norm(gradient), rel=1e-5)


def test_micro_batches_were_many_and_ranks_measured_the_same(results) -> None:
    one, two = results[1][0], results[2]
    for variant in trainer_program.VARIANTS:
        assert [rank[variant]["metrics"] for rank in two] == [two[0][variant]["metrics"]] * 2
        assert _flat(one[variant]["metrics"]) == pytest.approx(_flat(two[0][variant]["metrics"]), rel=1e-4)
    assert one["whole"]["positions"][0] < one["split"]["positions"][0] < one["unshared"]["positions"][0]


def _flat(metrics):
    lists = {f"staleness_histogram/{s}": n for s, n in enumerate(metrics["staleness_histogram"])}
    maps = {f"kl_by_staleness/{s}": kl for s, kl in metrics["kl_by_staleness"].items()}
    rest = {key: value for key, value in metrics.items() if key not in ("staleness_histogram", "kl_by_staleness")}
    return {key: value for key, value in {**rest, **lists, **maps}.items() if value is not None}


@pytest.mark.parametrize("ranks", VARIANT_RANKS)
def test_clipping_scales_the_gradient_and_reports_the_norm_before_it(results, ranks) -> None:
    clipped, whole = results[ranks][0]["clipped"], results[ranks][0]["whole"]
    assert clipped["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-6)
    assert clipped["grad_norm"] > 10 * trainer_program.CLIP
    assert _norm(clipped["gradient"]) == pytest.approx(trainer_program.CLIP, rel=1e-4)


@pytest.mark.parametrize("ranks", VARIANT_RANKS)
def test_an_offloaded_optimizer_makes_the_same_weights(results, ranks) -> None:
    offloaded, whole = results[ranks][0]["offloaded"], results[ranks][0]["whole"]
    before = {f"model.{n}": p.detach() for n, p in model().named_parameters()}
    moved = {n: w - before[n] for n, w in whole["weights"].items()}
    assert _norm(moved) > 0
    assert _distance({n: w - before[n] for n, w in offloaded["weights"].items()}, moved) < 1e-3
    for ours, theirs in zip(offloaded["shards"], whole["shards"], strict=True):
        assert ours[:3] == theirs[:3]


@pytest.mark.parametrize("ranks", VARIANT_RANKS)
def test_two_steps_under_recomputed_proximals_follow_adam(results, ranks) -> None:
    batch, policy = random_batch(trainer_program.SEED), model().double()
    learner = trainer_program.LEARNER
    optimizer = torch.optim.AdamW(policy.parameters(), betas=learner.betas, weight_decay=0.0)
    with torch.no_grad():
        start = plain_logprobs(policy, batch)
    chosen = plan(batch, ranks=1, micro_batch_tokens=60, mini_batches=2, share_prompts=True, pad_token=0)
    for number, mini_batch in enumerate(chosen):
        groups = {name[0] for micro_batch in mini_batch.ranks[0] for name in micro_batch.names}
        keys = [key for key in trained(batch) if key[0] in groups]
        logprobs = plain_logprobs(policy, batch)
        tokens = [
            {**t, "prox": float(start[key][0])}
            for key, t in zip(trained(batch), _tokens(batch, logprobs), strict=True)
            if key[0] in groups
        ]
        _, slopes, _ = step("decoupled", tokens)
        policy.zero_grad()
        sum(slope * logprobs[key][0] for slope, key in zip(slopes, keys, strict=True)).backward()
        for group in optimizer.param_groups:
            group["lr"] = learner.lr * (number + 1) / learner.warmup_steps
        optimizer.step()
    got = results[ranks][0]["two steps"]
    assert got["lr"] == pytest.approx(learner.lr / 2)
    gradient = {f"model.{n}": p.grad for n, p in policy.named_parameters()}
    assert _distance(got["gradient"], gradient) < 1e-4
    weights = {f"model.{n}": p.detach() for n, p in policy.named_parameters()}
    before = {f"model.{n}": p.detach().double() for n, p in model().named_parameters()}
    moved = {n: weights[n] - before[n] for n in weights}
    assert _distance({n: got["weights"][n].double() - before[n] for n in weights}, moved) < 1e-2


@pytest.mark.parametrize("ranks", VARIANT_RANKS)
def test_shards_are_the_published_weights_under_checkpoint_names(results, ranks) -> None:
    for variant in ("whole", "two steps", "offloaded"):
        weights = {n.removeprefix("model."): w for n, w in results[ranks][0][variant]["weights"].items()}
        assert "lm_head.weight" not in weights  # tied
        for parts in zip(*(rank[variant]["shards"] for rank in results[ranks]), strict=True):
            name, numel = parts[0][0], parts[0][2]
            assert [part[:3:2] for part in parts] == [(name, numel)] * ranks
            assert [part[1] for part in parts] == [min(r * -(-numel // ranks), numel) for r in range(ranks)]
            whole = torch.cat([part[3] for part in parts])
            assert whole.dtype == torch.bfloat16
            assert torch.equal(whole, weights.pop(name).flatten().to(torch.bfloat16))
        assert not weights


@pytest.mark.parametrize("ranks", PUBLISHED_RANKS)
@pytest.mark.parametrize("variant", trainer_program.PUBLISHED)
def test_deltas_of_the_shards_give_bitwise_the_gathered_weights(results, ranks, variant) -> None:
    shapes = {name: p.numel() for name, p in uneven_model().named_parameters()}
    assert min(shapes.values()) == SMALLEST
    assert any(numel % 4 for numel in shapes.values())
    versions = results[ranks][0]["published"][variant]
    assert len(versions) == STEPS + 1
    for number, version in enumerate(versions):
        received, gathered = version["received"], version["gathered"]
        assert {name: len(bits) for name, bits in gathered.items()} == shapes
        assert received.keys() == gathered.keys()
        for name in shapes:
            assert torch.equal(received[name].view(torch.int16), gathered[name].view(torch.int16)), name
        assert version["checksums_agree"]
        if number:
            before = versions[number - 1]["gathered"]
            moved = {n: int((before[n].view(torch.int16) != gathered[n].view(torch.int16)).sum()) for n in shapes}
            assert version["changed"] == sum(moved.values()) > 0


@pytest.mark.parametrize("ranks", PUBLISHED_RANKS)
def test_ranks_listen_on_loopback_alone(results, ranks) -> None:
    for rank in results[ranks]:
        assert set(rank["listeners"]) <= {"127.0.0.1"}


def test_a_parameter_without_a_shard_in_memory_is_refused(results) -> None:
    refused = results[2][0]["without a shard"]
    assert refused.startswith("model.embed_tokens.weight: a shard of 1 elements in memory, expected ")
