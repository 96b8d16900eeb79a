from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import trio
from tiny import TINY_ENGINE

from lachesis_actors.engine import (
    Completion,
    EngineError,
    EngineRefused,
    engine_command,
    engine_environment,
    open_engine,
)
from lachesis_configs.schema import Engine as EngineConfig


def options(command: list[str]) -> dict[str, str]:
    pairs = {}
    for i, word in enumerate(command):
        if word.startswith("--"):
            after = command[i + 1] if i + 1 < len(command) else "--"
            pairs[word[2:]] = "" if after.startswith("--") else after
    return pairs


def test_the_command_line():
    config = EngineConfig(max_model_len=99, max_num_seqs=7, tensor_parallel=2, kv_cache_gib=1.5)
    command = engine_command(config, model_path=Path("/m"), port=1234, seed=5, cpu=True)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = options(command)
    assert given["host"] == "127.0.0.1"
    assert given["port"] == "1234"
    assert given["model"] == "/m"
    assert given["max-model-len"] == "99"
    assert given["max-num-seqs"] == "7"
    assert given["tensor-parallel-size"] == "2"
    assert given["logprobs-mode"] == "processed_logprobs"
    assert given["weight-transfer-config"] == '{"backend": "lachesis"}'
    assert "enforce-eager" in given
    assert "kv-cache-memory-bytes" not in given
    on_gpu = options(engine_command(config, model_path=Path("/m"), port=1234, seed=5, cpu=False))
    assert on_gpu["kv-cache-memory-bytes"] == str(3 << 29)
    assert "enforce-eager" not in on_gpu


def test_kept_keys_and_values_need_a_salted_scheduler():
    def given(**fields):
        return options(engine_command(EngineConfig(), model_path=Path("/m"), port=1, seed=0, **fields))

    assert "scheduler-cls" not in given(cpu=True)
    assert given(cpu=True, kv="keep")["scheduler-cls"] == "lachesis_actors.scheduler.SaltedScheduler"
    assert given(cpu=False, kv="keep")["scheduler-cls"] == "lachesis_actors.scheduler.SaltedAsyncScheduler"


def test_further_arguments():
    config = EngineConfig(
        arguments={"enable-prefix-caching": False, "enforce-eager": False, "block-size": 32, "trust-remote-code": True}
    )
    command = engine_command(config, model_path=Path("/m"), port=1, seed=0, cpu=True)
    assert "--no-enable-prefix-caching" in command
    assert "--no-enforce-eager" in command
    assert "--enforce-eager" not in command
    assert "--trust-remote-code" in command
    assert options(command)["block-size"] == "32"


@pytest.mark.parametrize("name", ["host", "port", "logprobs-mode", "weight-transfer-config", "model", "scheduler-cls"])
def test_arguments_that_correctness_hangs_on_are_refused(name):
    config = EngineConfig(arguments={name: "x"})
    with pytest.raises(ValueError, match=f"actor.engine.arguments: '{name}'"):
        engine_command(config, model_path=Path("/m"), port=1, seed=0, cpu=True)


def test_the_environment_on_a_cpu():
    def env(**fields):
        return engine_environment(EngineConfig(**fields), inherited={"PATH": "p"}, gpus=None, cpu=True)

    plain = env(kv_cache_gib=0.3)
    assert plain["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert plain["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert plain["VLLM_SERVER_DEV_MODE"] == "1"
    assert plain["VLLM_HOST_IP"] == "127.0.0.1"
    assert plain["GLOO_SOCKET_IFNAME"] == "lo"
    assert plain["PATH"] == "p"
    assert "OMP_NUM_THREADS" not in plain
    assert env(cores="0-1")["OMP_NUM_THREADS"] == "2"
    assert env(cores="0-1", threads=1)["OMP_NUM_THREADS"] == "1"
    assert env(threads=3)["OMP_NUM_THREADS"] == "3"
    assert env(cores="0-3", tensor_parallel=2)["OMP_NUM_THREADS"] == "2"
    assert env(cores="0", tensor_parallel=2)["OMP_NUM_THREADS"] == "1"
    assert env(tensor_parallel=10_000)["OMP_NUM_THREADS"] == "1"


def test_the_environment_on_gpus():
    config = EngineConfig(tensor_parallel=2)
    env = engine_environment(config, inherited={}, gpus=[4, 5], cpu=False)
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5"
    with pytest.raises(ValueError, match=r"actor\.gpus"):
        engine_environment(config, inherited={}, gpus=[4], cpu=False)


def test_completions_without_a_logprob_are_invalid():
    def completion(value: float) -> Completion:
        return Completion(
            token_ids=np.array([1], np.int32),
            logprobs=np.array([value], np.float32),
            versions=np.array([0], np.int32),
            finish_reason="stop",
        )

    assert completion(-0.1).valid
    for value in (-9999.0, -9000.0, float("nan"), float("-inf")):
        assert not completion(value).valid


@pytest.fixture(scope="module")
def reference(tiny_model):
    """Log-probs of output tokens under the same weights, computed by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def logits(prompt: list[int], output: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            everything = model(torch.tensor([prompt + output.tolist()])).logits[0]
        return everything[len(prompt) - 1 : -1]

    return logits


PROMPT = [1, 269, 266, 201, 86, 270, 282, 267, 33, 2, 201, 1, 291, 85, 284, 290, 86, 201]


def chosen(logprobs, output: np.ndarray) -> np.ndarray:
    return logprobs[np.arange(len(output)), output]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.trio
async def test_logprobs_are_those_at_the_sampling_temperature(engine, reference, temperature):
    sampling = {"n": 4, "temperature": temperature, "max_tokens": 48, "ignore_eos": True}
    for completion in await engine.generate(PROMPT, sampling):
        assert len(completion.token_ids) == 48
        logits = reference(PROMPT, completion.token_ids)
        expected = chosen((logits / temperature).log_softmax(-1).numpy(), completion.token_ids)
        difference = np.abs(expected - completion.logprobs)
        assert difference.mean() < 0.05  # vLLM computes in bf16
        assert difference.max() < 0.3
        if temperature != 1.0:
            raw = chosen(logits.log_softmax(-1).numpy(), completion.token_ids)
            assert np.abs(raw - completion.logprobs).mean() > 5 * difference.mean()


@pytest.mark.slow
@pytest.mark.trio
async def test_logprobs_are_renormalised_over_what_top_p_and_top_k_leave(engine, reference):
    for sampling in ({"top_k": 20}, {"top_p": 0.8}):
        sampling = {**sampling, "temperature": 0.7, "max_tokens": 64, "ignore_eos": True}
        (completion,) = await engine.generate(PROMPT, sampling)
        probs = (reference(PROMPT, completion.token_ids) / 0.7).softmax(-1)
        ordered, order = probs.sort(dim=-1, descending=True)
        kept = ordered.cumsum(-1) - ordered < sampling.get("top_p", 1.0)
        kept[:, sampling.get("top_k", kept.shape[1]) :] = False
        support = (probs * 0).scatter(1, order, kept.float())
        expected = (probs * support / (probs * support).sum(-1, keepdim=True)).log().numpy()
        difference = np.abs(chosen(expected, completion.token_ids) - completion.logprobs)
        plain = np.abs(chosen(probs.log().numpy(), completion.token_ids) - completion.logprobs)
        assert np.median(difference) < 0.05
        assert np.median(plain) > 0.15


@pytest.mark.slow
@pytest.mark.trio
async def test_versions_are_those_that_sampled_the_token(engine):
    await engine.label(7)
    assert await engine.current_label() == "7"
    (completion,) = await engine.generate(PROMPT, {"max_tokens": 5, "ignore_eos": True})
    assert completion.versions.tolist() == [7] * 5
    done: list[Completion] = []

    async def long_request() -> None:
        done.extend(await engine.generate(PROMPT, {"max_tokens": 400, "ignore_eos": True}))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(long_request)
            await trio.sleep(0.3)
            await engine.pause(clear_cache=True)
            assert (await engine.control("GET", "/is_paused"))["is_paused"]
            await engine.label(8)
            await engine.resume()
    versions = done[0].versions
    assert len(versions) == 400
    assert set(versions.tolist()) == {7, 8}
    assert (np.diff(versions) >= 0).all()


@pytest.mark.slow
@pytest.mark.trio
async def test_text_and_ids_agree(engine, tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "user", "content": "two plus three?"}]
    prompt = await engine.render_chat({"messages": messages})
    assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert await engine.tokenize("hello two") == tokenizer.encode("hello two")
    (completion,) = await engine.generate(prompt, {"max_tokens": 12, "seed": 3}, text=True)
    # vLLM leaves an incomplete character at the end out.
    decoded = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert completion.text.rstrip("\ufffd") == decoded.rstrip("\ufffd")
    assert len(completion.pieces) == len(completion.token_ids)
    (again,) = await engine.generate(prompt, {"max_tokens": 12, "seed": 3})
    assert again.token_ids.tolist() == completion.token_ids.tolist()
    assert again.text == ""


@pytest.mark.slow
@pytest.mark.trio
async def test_refusals_carry_vllms_words(engine):
    with pytest.raises(EngineRefused, match="temperature") as refusal:
        await engine.generate(PROMPT, {"temperature": -1.0})
    assert refusal.value.status == 400
    with pytest.raises(EngineRefused, match="max_num_seqs"):
        await engine.generate(PROMPT, {"n": 1000})
    with pytest.raises(EngineRefused, match="/nothing: 404"):
        await engine.control("GET", "/nothing")


@pytest.mark.slow
@pytest.mark.trio
async def test_cancelling_aborts_the_request(engine):
    async def running() -> float:
        text = (await engine._control.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.split()[-1]) for line in lines)

    with trio.move_on_after(0.5):
        await engine.generate(PROMPT, {"n": 8, "max_tokens": 490, "ignore_eos": True})
        raise AssertionError("the request ended too early to be cancelled")
    with trio.fail_after(5):
        while await running():
            await trio.sleep(0.05)


SCRIPT = """
import sys, trio
from pathlib import Path
from lachesis_actors.engine import open_engine
from lachesis_configs.schema import Engine

async def main():
    config = Engine(max_model_len=512, kv_cache_gib=1.0, max_num_seqs=32)
    async with open_engine(config, model_path=Path(sys.argv[1]), log_path=Path(sys.argv[2]), seed=0):
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.fixture(scope="module")
def other_actor(tiny_model, tmp_path_factory) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process that has an engine, whose log is the path. Two tests ask for it so that two engines start at once."""
    log_path = tmp_path_factory.mktemp("other_actor") / "vllm.log"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tiny_model), str(log_path)])
    yield process, log_path
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.trio
async def test_the_death_of_a_worker_ends_the_block_with_the_log(other_actor, tiny_model, tmp_path):
    log_path = tmp_path / "vllm.log"
    group: dict[int, str] = {}

    async def kill_the_core() -> None:
        async with open_engine(TINY_ENGINE, model_path=tiny_model, log_path=log_path, seed=0) as engine:
            await engine.label(0)
            group.update(group_of(log_path))
            os.kill(next(pid for pid, name in group.items() if "EngineCore" in name), signal.SIGKILL)
            with trio.fail_after(30):
                await trio.sleep_forever()

    with pytest.raises(EngineError, match=r"(?s)vLLM ended with status \d+; its log .*vllm\.log says:\n.*EngineCore"):
        await kill_the_core()
    with trio.fail_after(5):
        while any(alive(pid) for pid in group):
            await trio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.trio
async def test_no_process_of_vllm_survives_kill_9_of_the_actor(other_actor):
    parent, log_path = other_actor
    group: dict[int, str] = {}
    with trio.fail_after(120):
        while not any("Worker" in name for name in group.values()):
            assert parent.poll() is None
            await trio.sleep(0.2)
            group = group_of(log_path)
    parent.kill()
    parent.wait()
    with trio.fail_after(20):
        while any(alive(pid) for pid in group):
            await trio.sleep(0.1)


def alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def group_of(log_path: Path) -> dict[int, str]:
    """The processes, with their command lines, in the process group of the vLLM server that writes `log_path`."""
    found: dict[int, str] = {}
    group = None
    everything = {}
    for entry in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
            pid = int(entry.name)
            everything[pid] = (
                int((entry / "stat").read_text().rsplit(")", 1)[1].split()[2]),
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(),
            )
            if os.path.realpath(entry / "fd" / "1") == str(log_path):
                group = everything[pid][0]
    for pid, (leader, command) in everything.items():
        if leader == group:
            found[pid] = command
    return found
