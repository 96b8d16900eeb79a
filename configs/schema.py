"""The configuration of a run: one tree of pydantic models, shared by all roles.

Every knob has a docstring and a default that works; unknown keys and wrong types are errors that name the key.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lachesis_configs.addresses import host_of, on_loopback
from lachesis_configs.cores import parse_cores

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _address(address: str) -> str:
    host, port = host_of(address), address.rpartition(":")[2]
    if int(port) > 65535:
        raise ValueError(f"value {address!r}, expected a port up to 65535")
    if not _is_ipv4(host) and not _HOST_NAME.fullmatch(host):
        raise ValueError(f"value {address!r}, expected an IPv4 address or a host name before the port")
    return address


_HOST_NAME = re.compile(r"(?=.{1,253}$)(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z](?:[A-Za-z0-9-]{0,62})\.?")
Address = Annotated[str, Field(pattern=r"^tcp://[^:/]+:[0-9]{1,5}$"), AfterValidator(_address)]


def _metrics_address(address: str) -> str:
    _address(address)
    if not on_loopback(address):
        port = address.rpartition(":")[2]
        raise ValueError(
            f"value {address!r}, expected a loopback address such as 127.0.0.1:{port}: metrics have no keys"
        )
    return address


MetricsAddress = Annotated[str, Field(pattern=r"^[^:/]+:[0-9]{1,5}$"), AfterValidator(_metrics_address)]


def _cores(text: str) -> str:
    try:
        parse_cores(text)
    except ValueError as error:
        raise ValueError(f"value {text!r}, expected {error}") from None
    return text


Cores = Annotated[str, AfterValidator(_cores)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


class Section(BaseModel):
    """Base of every part of the tree: strict types, no unknown keys, immutable, docstrings as descriptions.

    Checks between keys raise ValueError("key: value ..., expected ..."), the key relative to the section.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Run(Section):
    """What this run is called, where it writes and how long it goes on."""

    name: Name = "run"
    """Name of the run; the default folder is runs/NAME."""
    folder: Annotated[str, Field(min_length=1)] | None = None
    """Run folder: config, logs, metrics, checkpoints, summary, report. Default: runs/NAME."""
    steps: Positive = 40
    """Batches to train; one batch makes one new policy version."""
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """Seed of everything random in every role."""
    keys: Annotated[str, Field(min_length=1)] | None = None
    """Folder with this node's keys, made by `lachesis keys`: encrypts and authenticates what the roles say to each
    other, and is needed for an address off loopback."""
    evaluate_every: NonNegative = 0
    """Evaluate on held-out items each time this many versions were trained. Whatever it is, a run evaluates before its
    first group and at its end, and a run that goes on (--resume) before its first group from there."""


class Model(Section):
    """The policy that is trained and served."""

    path: str = "smollm2-135m-instruct"
    """Folder in Hugging Face format, or the name of an embedded model (smollm2-135m-instruct)."""


class Queue(Section):
    """The replay queue."""

    address: Address = "tcp://127.0.0.1:5710"
    """Where the queue listens and its clients connect. Off loopback needs run.keys."""
    batch_groups: Positive = 8
    """B: groups in one batch."""
    max_bytes: Positive = 1 << 30
    """Bytes of groups, ready or leased, that the queue holds before it answers `full`."""
    max_uncommitted_bytes: Positive = 4 << 30
    """Bytes of trained groups that no checkpoint holds: from half of them on the queue asks for a checkpoint."""
    heartbeat_seconds: Annotated[float, Field(gt=1)] = 10.0
    """An actor that was silent for this long is gone: its tickets are voided."""
    metrics_address: MetricsAddress | None = None
    """Where the queue answers Prometheus over HTTP (127.0.0.1:9464, say; port 0 takes a free one); default: nowhere.
    Loopback only: HTTP has no keys here."""


class Staleness(Section):
    """How old a token may be when it is trained."""

    max: NonNegative = 2
    """S: the hard bound, in versions. 0 makes the run synchronous."""
    late: Literal["wait", "drop", "mask_tokens"] = "wait"
    """What a batch does about a group that is due and not there: wait for it, drop it at once, or go on without it and
    later train those of its tokens that are young enough."""
    late_seconds: Seconds = 120.0
    """How long a batch waits, for a late group or for enough groups, before a group is dropped and counted."""
    reuse: Positive = 1
    """R: batches that train each group, one after another; all of them within the bound, so at most max + 1."""
    order: Literal["deadline", "freshest", "uniform"] = "deadline"
    """Which ready groups a batch takes: those due first, which wastes none; the youngest; or any. The last two keep the
    bound, but groups get too old and are dropped."""

    @model_validator(mode="after")
    def _reuse_within_the_bound(self) -> Self:
        if self.reuse > self.max + 1:
            raise ValueError(f"reuse: value {self.reuse}, expected at most {self.max + 1} (staleness.max + 1)")
        return self


class Engine(Section):
    """The vLLM server of an actor."""

    max_model_len: Positive = 1024
    """Longest sequence, prompt and answer together, in tokens."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """KV-cache memory in GiB (CPU: VLLM_CPU_KVCACHE_SPACE, rounded up; GPU: --kv-cache-memory-bytes)."""
    max_num_seqs: Positive = 64
    """Sequences that one scheduler step may run together."""
    tensor_parallel: Positive = 1
    """Workers that share one engine."""
    cores: Cores | None = None
    """CPU cores for the engine's threads ("0" or "0-1"); default: the scheduler decides."""
    threads: Threads | None = None
    """OpenMP threads of each worker on a CPU; default: its share of the cores."""
    start_seconds: Seconds = 300.0
    """Deadline for the engine to answer its first health check."""
    arguments: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of vLLM's server by their long names without the dashes: {"enable-chunked-prefill": true}."""


class Environment(Section):
    """One Atropos environment, run by every actor."""

    path: str = "arithmetic"
    """Name of an environment that comes with Lachesis (arithmetic, gsm8k) or path of a file with a BaseEnv subclass."""
    name: Name = "arithmetic"
    """Name in logs and metrics."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the groups, relative to the other environments, while all of them have workers to spare."""
    workers: Positive = 16
    """Groups that this environment works on at once, at most."""
    group_size: Positive = 8
    """G: trajectories a group."""
    max_token_length: Positive = 512
    """Longest trajectory in tokens."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the environment's own config class."""


class Actor(Section):
    """Rollout actors; each is one vLLM server with its gateway, trajectory API and environments."""

    count: Positive = 1
    """Actors that `lachesis launch` starts."""
    port: NonNegative = 0
    """Port of gateway and trajectory API on 127.0.0.1, port + i for the actor of index i; 0 takes a free one."""
    gpus: list[NonNegative] | None = None
    """CUDA devices of this node's actors, `tensor_parallel` of them each, in the order of the actors' indices."""
    advantages: Literal["given", "group", "mean", "loo"] = "group"
    """Token advantages where the environment gave none: `group` (R-mean)/std, `mean` R-mean, `loo` R-mean of the
    others; `given` takes only those that the environment gave."""
    weights_channel: Literal["auto", "stream"] = "auto"
    """How these actors get deltas: as weights.channel says, or by stream whatever the others do (a slow link)."""
    engine: Engine = Field(default_factory=Engine)
    """The vLLM server."""

    @model_validator(mode="after")
    def _gpus_for_every_actor(self) -> Self:
        each = self.engine.tensor_parallel
        if self.gpus is not None:
            _distinct("gpus", self.gpus)
            if len(self.gpus) < self.count * each or len(self.gpus) % each:
                raise ValueError(
                    f"gpus: value {self.gpus}, expected {self.count * each} devices: {each} "
                    f"(actor.engine.tensor_parallel) for each of {self.count} actors (actor.count)"
                )
        if self.port and self.port + self.count - 1 > 65535:
            raise ValueError(f"port: value {self.port}, expected {self.count} ports from there up to 65535")
        return self


PROXIMALS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ppo": ("behaviour", "recompute"),
    "tis": ("recompute",),
    "decoupled": ("recompute",),
    "dppo": (),
}
"""Which proximals each correction takes, the default first. With any other its formula would do nothing."""


class Correction(Section):
    """The off-policy correction and its constants (docs/objective.md)."""

    name: Literal["none", "ppo", "tis", "decoupled", "dppo"] = "ppo"
    """Which one."""
    proximal: Literal["behaviour", "recompute"] | None = None
    """Where the proximal log-prob comes from; default: the first that the correction takes."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ppo, tis, decoupled: lower clip 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """ppo, tis, decoupled: upper clip 1 + clip_high."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """tis: cap of the importance weight (default 2). decoupled: tokens with a larger weight are masked (default 5)."""
    delta: Annotated[float, Field(gt=0)] = 0.2
    """dppo: tokens whose probability moved by more than this in the advantage's direction are masked."""
    kappa: Annotated[float, Field(ge=0)] = 1e-3
    """dppo: weight of the squared log-ratio."""


class Learner(Section):
    """The DeepSpeed ZeRO-3 learner."""

    ranks: Positive = 1
    """Processes that share the model, on this node."""
    threads: Threads | None = None
    """Torch threads a rank on a CPU; default: all cores divided by the ranks."""
    cores: Cores | None = None
    """CPU cores that the learner may use ("1" or "0-1"); default: all."""
    gpus: list[NonNegative] | None = None
    """CUDA devices of the ranks, one a rank; default: 0 to ranks - 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner computes; auto: cuda where there is one."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Compute and published precision: bf16 (fp32 master weights), or fp32 (tests; published as bf16 all the same)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state and the fp32 master weights in host memory and step there: slower, for models that
    don't fit otherwise."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Learning rate of AdamW, constant after the warm-up."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate grows linearly from lr/warmup_steps."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""
    mini_batches: Positive = 1
    """Optimizer steps inside one batch."""
    micro_batch_tokens: Positive = 2048
    """Token budget of one forward and backward pass on one rank, padding included."""
    share_prompts: bool = True
    """Pack a group's prompt once with its completions after it under a 4-D mask."""
    correction: Correction = Field(default_factory=Correction)
    """Off-policy correction."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Lambda: a token of staleness s counts lambda^s; 1 turns it off."""
    checkpoint_every: Positive = 10
    """Versions between two checkpoints (there is always one at the end)."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints to keep."""

    @model_validator(mode="before")
    @classmethod
    def _betas_from_yaml(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("betas"), list):
            return {**value, "betas": tuple(value["betas"])}
        return value

    @model_validator(mode="after")
    def _one_gpu_a_rank(self) -> Self:
        if self.gpus is not None:
            _distinct("gpus", self.gpus)
            if len(self.gpus) != self.ranks:
                raise ValueError(f"gpus: value {self.gpus}, expected {self.ranks} devices, one a rank (learner.ranks)")
        return self

    @model_validator(mode="after")
    def _betas_below_one(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: value {list(self.betas)}, expected two numbers from 0 to below 1")
        return self

    @model_validator(mode="after")
    def _correction_does_something(self) -> Learner:
        name, proximal, cap = self.correction.name, self.correction.proximal, self.correction.cap
        takes = PROXIMALS[name]
        if proximal is not None and proximal not in takes:
            expected = " or ".join(takes) if takes else "none at all"
            raise ValueError(f"correction.proximal: value {proximal!r}, expected {expected}: what {name} takes")
        if name == "ppo" and proximal == "recompute" and self.mini_batches == 1:
            raise ValueError(
                "correction.proximal: value 'recompute' with ppo and learner.mini_batches 1, expected behaviour or more"
                " mini-batches: in a batch's only step the ratio is 1 and nothing is ever clipped"
            )
        if cap is not None and name not in ("tis", "decoupled"):
            raise ValueError(f"correction.cap: value {cap}, expected none: {name} has no cap (tis and decoupled have)")
        return self


class Weights(Section):
    """Publication of new policies to the actors."""

    address: Address = "tcp://127.0.0.1:5711"
    """Control address of the publisher: membership, announcements, the stream channel. Off loopback needs run.keys."""
    channel: Literal["collective", "stream"] = "collective"
    """How members get deltas: torch collectives (gloo on CPUs, nccl on GPUs) or ZeroMQ. Joiners always stream."""
    trusted_network: bool = False
    """Allow the collective channel off loopback, though it has no keys: whoever reaches its ports can read the weights
    and forge them."""
    deadline_seconds: Seconds = 30.0
    """What a dead or hanging member costs at most, once."""


KeyValues = Literal["recompute", "keep"]


class Activation(Section):
    """How an engine goes over to a new version."""

    kv: KeyValues = "recompute"
    """Keys and values of running requests: `recompute` them under the new weights, so that every log-prob is of one
    version; or `keep` them, so that nothing is prefilled again, but the log-probs of requests that go on are of mixed
    versions. New requests never meet keys and values of older versions."""


class Config(Section):
    """A run."""

    run: Run = Field(default_factory=Run)
    """Name, folder, length, seed."""
    model: Model = Field(default_factory=Model)
    """The policy."""
    queue: Queue = Field(default_factory=Queue)
    """The replay queue."""
    staleness: Staleness = Field(default_factory=Staleness)
    """The bound and what is done to keep it."""
    actor: Actor = Field(default_factory=Actor)
    """The rollout actors."""
    environments: Annotated[list[Environment], Field(min_length=1)] = Field(default_factory=lambda: [Environment()])
    """What the actors' environments are."""
    learner: Learner = Field(default_factory=Learner)
    """The learner."""
    weights: Weights = Field(default_factory=Weights)
    """Publication."""
    activation: Activation = Field(default_factory=Activation)
    """What an actor's engine does about a new version."""

    @model_validator(mode="after")
    def _addresses_differ(self) -> Self:
        if self.queue.address == self.weights.address and not self.queue.address.endswith(":0"):
            raise ValueError(f"weights.address: value {self.weights.address!r} is queue.address, expected another port")
        return self

    @model_validator(mode="after")
    def _keys_off_loopback(self) -> Self:
        for key, address in (("queue.address", self.queue.address), ("weights.address", self.weights.address)):
            if self.run.keys is None and not on_loopback(address):
                port = address.rpartition(":")[2]
                raise ValueError(
                    f"{key}: value {address!r}, expected a loopback address such as tcp://127.0.0.1:{port}, or keys: "
                    "set run.keys to a folder made by `lachesis keys`"
                )
        weights = self.weights
        if weights.channel == "collective" and not weights.trusted_network and not on_loopback(weights.address):
            raise ValueError(
                f"weights.channel: value 'collective' with weights.address {weights.address!r}, expected stream, or "
                "weights.trusted_network: true: the collective channel has no keys"
            )
        return self

    @model_validator(mode="after")
    def _environments_fit(self) -> Self:
        seen: dict[str, int] = {}
        for i, environment in enumerate(self.environments):
            first = seen.setdefault(environment.name, i)
            if first != i:
                raise ValueError(
                    f"environments.{i}.name: value {environment.name!r} is the name of environments.{first}, "
                    f"expected a name of its own"
                )
            if environment.max_token_length > self.actor.engine.max_model_len:
                raise ValueError(
                    f"environments.{i}.max_token_length: value {environment.max_token_length}, expected at most "
                    f"{self.actor.engine.max_model_len} (actor.engine.max_model_len)"
                )
        return self


def _distinct(key: str, devices: list[int]) -> None:
    if len(set(devices)) != len(devices):
        raise ValueError(f"{key}: value {devices}, expected no device twice")
