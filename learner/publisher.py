"""Publication of new policies: what every learner rank encodes, and what rank 0 sends to the actors.

Every rank owns a `ShardEncoder`; rank 0 also owns the `Publisher`, which lives in its trio thread:

    encoder = ShardEncoder(shards, rank=rank, ranks=ranks)          # on every rank
    wire = encoder.encode(anchor=True).to_wire()                    # first publication: everything
    blobs = gather_to_rank_0(wire)                                  # one `bytes` a rank, in rank order

    publisher = Publisher(address=..., layout=encoder.layout, channel="collective", deadline_seconds=30.0)
    async with trio.open_nursery() as nursery:                      # rank 0
        await nursery.start(publisher.serve)
        await publisher.publish(version=0, parent=None, blobs=blobs)
        await publisher.publish(version=1, parent=0, blobs=blobs_of_the_next_encode)
        await publisher.finish()
        nursery.cancel_scope.cancel()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import trio

from lachesis_transport.weights.layout import Layout


class NonFiniteWeights(ValueError):
    """A weight is NaN or infinite; the text names the tensor, the flat index and the value. Nothing was encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of one tensor."""

    name: str
    """Name as in the Hugging Face checkpoint's safetensors; a tied lm_head never appears."""
    flat: torch.Tensor
    """bf16[n]: the valid elements of this rank's part (no padding); n may be 0. May be a view of live weights, on any
    device: it is read anew at each `encode`."""
    start: int
    """Index of flat[0] in the flattened whole tensor: rank * ceil(numel / ranks), at most numel."""
    numel: int
    """Elements of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBlob:
    """What one rank contributes to one version."""

    rank: int
    ranks: int
    anchor: bool
    """True: values of every element. False: the exact difference to the previous `encode`."""
    checksums: bytes
    """16 bytes (xxh3-128) a tensor, in layout order, over this rank's part after the change."""
    changed: int
    """Elements of this shard whose bits changed (an anchor: all)."""
    total: int
    """Elements of this shard."""
    payload: bytes
    """Encoded elements (lachesis_transport.weights.codec)."""

    def to_wire(self) -> bytes:
        """The bytes that travel to rank 0."""
        raise NotImplementedError

    @classmethod
    def from_wire(cls, wire: bytes | memoryview) -> ShardBlob:
        """Decode and check sizes. Raises MessageError."""
        raise NotImplementedError


class ShardEncoder:
    """Encodes a rank's shard of the bf16 weights against its own last published shard.

    Args:
        shards: this rank's part of every tensor, also where that part is empty; every rank names the same tensors.
        rank, ranks: this learner rank and their number.
    """

    layout: Layout
    """Names and sizes of the whole tensors, sorted by name: the same on every rank."""

    def __init__(self, shards: Sequence[Shard], *, rank: int, ranks: int) -> None:
        raise NotImplementedError

    def encode(self, *, anchor: bool = False) -> ShardBlob:
        """Encode what changed since the last call and make it the new baseline. Blocking; CPU-bound.

        The first call must be an anchor. Raises NonFiniteWeights, naming the tensor; the baseline is then unchanged.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a publication cost."""

    version: int
    checksum: str
    """xxh3-128 of the weights at this version, 32 hex digits."""
    bytes: int
    """Bytes that one member receives."""
    full_bytes: int
    """Bytes of the full bf16 weights."""
    changed: int
    """Elements that changed, over all ranks."""
    total: int
    """Elements of the model."""
    seconds: float
    """From the call of `publish` until the last healthy member staged the version or the deadline passed."""
    members: tuple[str, ...]
    """Actors that staged this version."""
    removed: dict[str, str]
    """Actors that were removed during this publication, and why."""
    channel: str
    """`collective`, `stream`, `collective+stream` (a collective broke and the healthy members streamed) or `none`."""


class Publisher:
    """Rank 0's side of publication: membership, announcements, the channels and the newest weights for joiners.

    Args:
        address: tcp://127.0.0.1:PORT of the control socket (weights.address); port 0 takes a free one.
        layout: of the whole model (ShardEncoder.layout).
        channel: how members get deltas (weights.channel).
        deadline_seconds: what a dead or hanging member costs at most, once (weights.deadline_seconds).
        device: where collective tensors live: cpu (gloo) or cuda (nccl).
    """

    def __init__(
        self,
        *,
        address: str,
        layout: Layout,
        channel: Literal["collective", "stream"],
        deadline_seconds: float,
        device: str = "cpu",
    ) -> None:
        raise NotImplementedError

    @property
    def address(self) -> str:
        """Where the control socket listens, with the real port; known once `serve` has started."""
        raise NotImplementedError

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the actors that are members now."""
        raise NotImplementedError

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve actors until cancelled. Reports started when the socket is bound."""
        raise NotImplementedError

    async def publish(self, *, version: int, parent: int | None, blobs: Sequence[bytes]) -> PublishReport:
        """Publish one version made of one blob (ShardBlob.to_wire) a rank, in rank order.

        Returns when every healthy member staged it, or when the deadline passed; those that had not are removed and
        heal when they come back. Anchors (the first publication, or after a resume) replace everything. One call at a
        time; cancelling it leaves the version published. Raises ValueError when version, parent or blobs do not fit
        what was published before.
        """
        raise NotImplementedError

    async def finish(self) -> None:
        """Tell the members that no more versions come; returns when they know, or after the deadline."""
        raise NotImplementedError
