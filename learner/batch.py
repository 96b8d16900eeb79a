"""Packing: from a leased batch to the forward and backward passes of every rank.

A group is packed as a prefix tree in depth-first order: what its trajectories share (the prompt, and whatever
completions have in common) appears once. A position attends to its ancestors and itself, that is to the positions
k <= q with q < ends[k], and its position id is its depth. So every hidden state is that of the unpacked sequence, and
packing changes nothing but the cost. Trees share a row of a micro-batch when they fit, without seeing each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from lachesis_transport.messages import Batch, Group, Trajectory

T = TypeVar("T")

PASS_COST = 64
"""Positions of padding that cost about as much as another pass, which adds its gradients to all parameters' again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass of one rank: R rows of L positions, K trained tokens, n sequences (CPU tensors)."""

    input_ids: torch.Tensor
    """int64 [R, L]; pad_token on padding."""
    position_ids: torch.Tensor
    """int64 [R, L]; 0 on padding."""
    ends: torch.Tensor
    """int64 [R, L]: position k of a row is seen by the positions q with k <= q < ends[k]; padding sees itself alone."""
    predict: torch.Tensor
    """int64 [K]: index into the flattened R * L positions, the one whose hidden state predicts the trained token."""
    targets: torch.Tensor
    """int64 [K]: the trained tokens. Those of one sequence are together and in order."""
    advantages: torch.Tensor
    """float32 [K]: A."""
    behaviour: torch.Tensor
    """float32 [K]: log mu."""
    staleness: torch.Tensor
    """int64 [K]: s, distance in the lineage tree."""
    versions: torch.Tensor
    """int64 [K]: the version that sampled the token."""
    sequences: torch.Tensor
    """int64 [K]: which sequence of this micro-batch the token belongs to, 0 to n - 1."""
    single_version: torch.Tensor
    """bool [K]: whether all trained tokens of its sequence come from one version."""
    names: tuple[tuple[str, int], ...]
    """n pairs: group id and index of the trajectory within its group."""
    tokens: int
    """Positions that are not padding."""

    @property
    def padding(self) -> int:
        """Positions that are padding."""
        return self.input_ids.numel() - self.tokens

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The arguments of `Policy.forward` on `device`."""
        return {
            name: getattr(self, name).to(device) for name in ("input_ids", "position_ids", "ends", "predict", "targets")
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one optimizer step trains on."""

    index: int
    """0 for the first of its batch: the weights are still those at the start of the batch."""
    trained_tokens: int
    """N: trained tokens of all ranks and micro-batches, the denominator of the loss."""
    ranks: tuple[tuple[MicroBatch, ...], ...]
    """For each rank its micro-batches; equally many on each (passes are collectives), padded with empty ones."""


def plan(
    batch: Batch, *, ranks: int, micro_batch_tokens: int, mini_batches: int, share_prompts: bool, pad_token: int
) -> list[MiniBatch]:
    """Split a batch into mini-batches of whole groups, over ranks and into micro-batches, balanced by tokens.

    A micro-batch has at most `micro_batch_tokens` positions, padding included, unless a single sequence is longer. A
    group that is too large is split, its prompt repeated. Deterministic: every rank may compute it for itself.
    Trajectories without a trained token are left out, and so is what follows the last trained token: neither changes
    the loss.

    Raises ValueError when there are fewer groups than mini-batches or a version has no known distance.
    """
    if len(batch.groups) < mini_batches:
        raise ValueError(f"mini_batches: {mini_batches}, expected at most {len(batch.groups)}, the groups of the batch")
    groups = [_sequences(group, batch.distances) for group in batch.groups]
    planned = []
    for index, chosen in enumerate(_balance([(_Tree.of(group).size, group) for group in groups], mini_batches)):
        trees = [
            tree
            for group in chosen
            for part in ([group] if share_prompts else [[sequence] for sequence in group])
            for tree in _split(_Tree.of(part), micro_batch_tokens)
        ]
        trees = _spread(trees, ranks)
        shares = _balance([(tree.size, tree) for tree in trees], ranks)
        packed = [_pack(share, micro_batch_tokens, pad_token) for share in shares]
        passes = max(len(micro_batches) for micro_batches in packed)
        empty = _assemble([], pad_token)
        planned.append(
            MiniBatch(
                index=index,
                trained_tokens=sum(len(sequence.targets) for group in chosen for sequence in group),
                ranks=tuple((*micro_batches, *[empty] * (passes - len(micro_batches))) for micro_batches in packed),
            )
        )
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """A trajectory up to what predicts its last trained token."""

    name: tuple[str, int]
    tokens: np.ndarray
    targets: np.ndarray
    """Indices of the trained tokens in the trajectory; the last is len(tokens)."""
    trajectory: Trajectory
    staleness: np.ndarray


def _sequences(group: Group, distances: dict[int, int]) -> list[_Sequence]:
    unknown = [version for version in group.versions if version not in distances]
    if unknown:
        raise ValueError(f"distances: no entry for version {unknown[0]} of group {group.group_id!r}")
    sequences = []
    for index, trajectory in enumerate(group.trajectories):
        targets = np.flatnonzero(trajectory.mask)
        if len(targets):
            versions, inverse = np.unique(trajectory.versions[targets], return_inverse=True)
            sequences.append(
                _Sequence(
                    name=(group.group_id, index),
                    tokens=trajectory.tokens[: targets[-1]],
                    targets=targets,
                    trajectory=trajectory,
                    staleness=np.array([distances[int(version)] for version in versions], dtype=np.int64)[inverse],
                )
            )
    # Lexicographic order puts what shares a prefix side by side, and a prefix before what continues it.
    return sorted(sequences, key=lambda sequence: sequence.tokens.astype(">i4").tobytes())


@dataclass(frozen=True, slots=True)
class _Tree:
    """Sequences, sorted, as a prefix tree in depth-first order."""

    sequences: Sequence[_Sequence]
    paths: Sequence[np.ndarray]
    """For each sequence the positions of its tokens in the tree."""
    size: int

    @classmethod
    def of(cls, sequences: Sequence[_Sequence]) -> _Tree:
        paths: list[np.ndarray] = []
        size = 0
        for before, sequence in zip([None, *sequences], sequences, strict=False):
            shared = 0 if before is None else _common(before.tokens, sequence.tokens)
            new = len(sequence.tokens) - shared
            kept = paths[-1][:shared] if paths else np.arange(0)
            paths.append(np.concatenate([kept, np.arange(size, size + new)]))
            size += new
        return cls(sequences, paths, size)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _split(tree: _Tree, limit: int) -> list[_Tree]:
    """The tree in parts of at most `limit` positions, as far as sequences are no longer than that themselves."""
    if tree.size <= limit or len(tree.sequences) == 1:
        return [tree]
    middle = len(tree.sequences) // 2
    halves = _Tree.of(tree.sequences[:middle]), _Tree.of(tree.sequences[middle:])
    return [part for half in halves for part in _split(half, limit)]


def _spread(trees: list[_Tree], ranks: int) -> list[_Tree]:
    """Split trees that are more than a rank's fair share, so that no rank waits for the one that got it."""
    fair = sum(tree.size for tree in trees) / ranks
    return [part for tree in trees for part in _split(tree, max(1, int(fair)))] if ranks > 1 else trees


def _balance(sized: Sequence[tuple[int, T]], bins: int) -> list[list[T]]:
    """Largest first, each to the bin with the least in it; within a bin in the order given."""
    loads: list[int] = [0] * bins
    chosen: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(sized)), key=lambda i: -sized[i][0]):
        least = loads.index(min(loads))
        loads[least] += sized[i][0]
        chosen[least].append(i)
    return [[sized[i][1] for i in sorted(indices)] for indices in chosen]


def _pack(trees: Iterable[_Tree], limit: int, pad_token: int) -> list[MicroBatch]:
    """Micro-batches of rows as long as their longest tree, smaller trees filling up what is left of a row."""
    left = sorted(trees, key=lambda tree: -tree.size)
    packed = []
    while left:
        length = left[0].size
        rows: list[list[_Tree]] = []
        room: list[int] = []
        later = []
        for tree in left:
            row = next((i for i, free in enumerate(room) if free >= tree.size), None)
            if row is not None:
                rows[row].append(tree)
                room[row] -= tree.size
            elif not rows or (
                (len(rows) + 1) * length <= limit
                and (4 * tree.size >= 3 * length or sum(room) + length - tree.size <= PASS_COST)
            ):
                rows.append([tree])
                room.append(length - tree.size)
            else:
                later.append(tree)
        packed.append(_assemble(rows, pad_token))
        left = later
    return packed


def _assemble(rows: Sequence[Sequence[_Tree]], pad_token: int) -> MicroBatch:
    """The tensors of a micro-batch; without rows, one of a single position of padding."""
    length = max((sum(tree.size for tree in row) for row in rows), default=1)
    shape = (max(len(rows), 1), length)
    input_ids = np.full(shape, pad_token, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    ends = np.tile(np.arange(1, length + 1, dtype=np.int64), (shape[0], 1))
    sequences: list[_Sequence] = []
    predict: list[np.ndarray] = []
    for r, row in enumerate(rows):
        start = 0
        for tree in row:
            for sequence, path in zip(tree.sequences, tree.paths, strict=True):
                at = start + path
                input_ids[r, at] = sequence.tokens
                position_ids[r, at] = np.arange(len(at))
                # Sequences come depth first, so the last one through a node leaves the end of its subtree there.
                ends[r, at] = at[-1] + 1
                sequences.append(sequence)
                predict.append(r * length + at[sequence.targets - 1])
            start += tree.size

    def joined(arrays: Iterable[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype))

    counts = [len(sequence.targets) for sequence in sequences]
    single = [bool((s.trajectory.versions[s.targets] == s.trajectory.versions[s.targets[0]]).all()) for s in sequences]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        ends=torch.from_numpy(ends),
        predict=joined(predict, np.int64),
        targets=joined((s.trajectory.tokens[s.targets] for s in sequences), np.int64),
        advantages=joined((s.trajectory.advantages[s.targets] for s in sequences), np.float32),
        behaviour=joined((s.trajectory.logprobs[s.targets] for s in sequences), np.float32),
        staleness=joined((s.staleness for s in sequences), np.int64),
        versions=joined((s.trajectory.versions[s.targets] for s in sequences), np.int64),
        sequences=torch.from_numpy(np.repeat(np.arange(len(sequences)), counts)),
        single_version=torch.from_numpy(np.repeat(np.array(single, dtype=bool), counts)),
        names=tuple(sequence.name for sequence in sequences),
        tokens=sum(tree.size for row in rows for tree in row),
    )
