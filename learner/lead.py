"""What all ranks of the learner do together: rank 0 leads, the others obey."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis_configs.load import ConfigError
from lachesis_configs.schema import Config
from lachesis_learner.checkpoint import (
    Checkpoint,
    Record,
    begin_checkpoint,
    complete_checkpoint,
    newest_checkpoint,
)
from lachesis_learner.metrics import Phases
from lachesis_learner.ranks import Kind, Ranks
from lachesis_transport.messages import Batch, pack, unpack

if TYPE_CHECKING:
    from lachesis_learner.shards import ShardEncoder
    from lachesis_learner.trainer import Trained
    from lachesis_transport.weights.mirror import Mirror

logger = logging.getLogger("lachesis.learner")


class Rank:
    """What every rank does when rank 0 says so."""

    def __init__(self, ranks: Ranks, config: Config) -> None:
        # Imports torch and DeepSpeed, which have to find the process prepared.
        from lachesis_learner.trainer import Trainer

        self.ranks, self.config = ranks, config
        self.trainer = Trainer(
            config.learner,
            model_path=Path(config.model.path),
            staleness_max=config.staleness.max,
            seed=config.run.seed,
            control=ranks.control,
        )
        self.encoder: ShardEncoder | None = None

    def obey(self) -> None:
        """Carry out commands until `stop`."""
        while True:
            kind, payload = self.ranks.receive()
            if kind == "stop":
                self.ranks.close(failed=False)
                return
            message = unpack(payload)
            if kind == "train":
                self.trainer.train(Batch.from_wire(message))
            elif kind == "encode":
                self.encode(anchor=message["anchor"])
            elif kind == "rebase":
                self.rebase(None)
            elif kind == "save":
                self.trainer.save(Path(message["folder"]))
            elif kind == "load":
                self.trainer.load(Path(message["folder"]))

    def encode(self, *, anchor: bool) -> list[bytes]:
        """The blobs of all ranks on rank 0, [] elsewhere."""
        return self.ranks.gather(self.open_encoder().encode(anchor=anchor).to_wire())

    def rebase(self, mirror: Mirror | None) -> None:
        """Let the next `encode` differ from these weights, which rank 0 has."""
        from lachesis_learner.published_before import shard_of

        part = None if mirror is None else partial(shard_of, mirror, ranks=self.ranks.size)
        self.open_encoder().rebase(self.ranks.scatter(part))

    def open_encoder(self) -> ShardEncoder:
        """This rank's encoder."""
        from lachesis_learner.shards import ShardEncoder

        if self.encoder is None:
            self.encoder = ShardEncoder(self.trainer.shards(), rank=self.ranks.rank, ranks=self.ranks.size)
        return self.encoder


class Lead(Rank):
    """Rank 0: what it does all ranks do, and it knows where the training stands.

    It begins from the newest checkpoint of the run folder. Raises ConfigError when other ranks than these wrote it, and
    CheckpointError when its record is malformed.
    """

    def __init__(self, ranks: Ranks, config: Config, folder: Path) -> None:
        super().__init__(ranks, config)
        self.folder = folder
        self.step = 0
        """Batches trained in this run."""
        self.version = 0
        self.parent: int | None = None
        self.unnamed = False
        """Whether the weights were trained further than `version`: the queue has not given their own one yet."""
        self.unsaved = False
        """Whether something was trained since the last checkpoint."""
        self.checkpoint = newest_checkpoint(folder)
        if self.checkpoint is not None:
            self._load(self.checkpoint)

    def train(self, batch: Batch, phases: Phases) -> Trained:
        """Train a batch and time its phases. Raises what `Trainer.train` raises."""
        if self.ranks.size > 1:
            self._all("train", batch.to_wire())
        trained = self.trainer.train(batch, phases)
        self.step += 1
        self.unnamed = self.unsaved = True
        return trained

    def name(self, version: int) -> None:
        """The weights that were just trained are `version`."""
        self.parent, self.version, self.unnamed = self.version, version, False

    def encode(self, *, anchor: bool) -> list[bytes]:
        """The blobs of all ranks: of whole weights when `anchor`, otherwise of what differs from the last ones."""
        self._all("encode", {"anchor": anchor})
        return super().encode(anchor=anchor)

    def rebase(self, mirror: Mirror | None) -> None:
        """Let the next `encode` differ from these weights."""
        self._all("rebase", {})
        super().rebase(mirror)

    def save(self, *, queue: str | None) -> Checkpoint:
        """Write a checkpoint of the weights at hand. `queue`: id of the one that gave their version, None without."""
        part = begin_checkpoint(self.folder, version=self.version)
        self._all("save", {"folder": str(part)})
        self.trainer.save(part)
        record = Record(
            version=self.version,
            parent=self.parent,
            step=self.step,
            run=self.config.run.name,
            queue=queue,
            ranks=self.ranks.size,
        )
        self.checkpoint = complete_checkpoint(part, record, keep=self.config.learner.keep_checkpoints)
        self.unsaved = False
        return self.checkpoint

    def _load(self, checkpoint: Checkpoint) -> None:
        record = checkpoint.record
        if record.ranks != self.ranks.size:
            raise ConfigError(
                [f"learner.ranks: value {self.ranks.size}, expected {record.ranks} to resume {checkpoint.path}"]
            )
        self._all("load", {"folder": str(checkpoint.path)})
        self.trainer.load(checkpoint.path)
        self.step, self.version, self.parent = record.step, record.version, record.parent
        logger.info("resumed from %s: version %d, step %d", checkpoint.path, record.version, record.step)

    def _all(self, kind: Kind, message: dict[str, Any]) -> None:
        self.ranks.send(kind, pack(message))
