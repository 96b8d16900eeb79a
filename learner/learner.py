"""`lachesis learner`: lease a batch, train it on all ranks, publish the new policy, checkpoint; until the run is done.

Rank 0 leads on its main thread; its input and output run in a trio thread beside it. SIGTERM and SIGINT are honoured
at the next batch boundary: the batch at hand is finished and checkpointed, what is leased is handed back.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lachesis_configs.load import ConfigError, dump_config
from lachesis_configs.models import resolve_model
from lachesis_configs.schema import Config
from lachesis_learner.checkpoint import (
    Checkpoint,
    Record,
    begin_checkpoint,
    complete_checkpoint,
    newest_checkpoint,
)
from lachesis_learner.metrics import MetricsWriter, Phases, step_line
from lachesis_learner.ranks import TICK_SECONDS, Kind, Ranks, prepare_process
from lachesis_learner.welcome import check_welcome
from lachesis_transport.groups_file import read_groups
from lachesis_transport.keys import load_keys
from lachesis_transport.messages import Batch, Group, MessageError, Scores, pack, unpack

if TYPE_CHECKING:
    from lachesis_learner.exchange import Exchange
    from lachesis_learner.shards import ShardEncoder
    from lachesis_learner.trainer import Trained
    from lachesis_transport.weights.mirror import Mirror

logger = logging.getLogger("lachesis.learner")

T = TypeVar("T")

GOODBYE_SECONDS = 10.0
"""What a stop grants the queue to answer, and the end the publisher's members."""


class Stopped(Exception):
    """A signal asked the learner to stop while it was waiting."""


def run_learner(config: Config, folder: Path, *, rank: int = 0, replay: Path | None = None) -> int:
    """Run one rank of the learner to its end; returns the exit code. Rank 0 starts the others.

    Args:
        folder: the run folder: metrics.jsonl, tensorboard/, checkpoints/.
        replay: a file of groups (`transport/groups_file.py`) to train in order instead of leasing, without queue and
            publication; the last line of metrics is printed. Tokens of version v > 0 have the staleness that they would
            have in the batch after v versions, others 0.

    Raises ConfigError for what a user can mend, RankDied, QueueError, NonFiniteInput and their like for a failed run.
    """
    device, size = prepare_process(config.learner, rank=rank), config.learner.ranks
    if rank:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # rank 0 gets them too and says when to stop
        _Rank(Ranks.follow(device=device, rank=rank, size=size), config).obey()
        return 0
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(resolve_model(config.model.path))})}
    )
    command: list[str] = []
    if size > 1:
        path = folder / "learner.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "lachesis", "learner", str(path), "--folder", str(folder)]
    with _stop_signals() as stop:
        ranks = Ranks.lead(device=device, size=size, command=command)
        failed = True
        try:
            lead = _Lead(ranks, config, folder, stop)
            if replay is not None:
                lead.replay(replay)
            else:
                lead.run()
            ranks.send("stop")
            failed = False
        except RuntimeError as error:
            ranks.explain(error)
            raise
        finally:
            ranks.close(failed=failed)
    return 0


class _Stop:
    def __init__(self) -> None:
        self.requested = False
        self.since = 0.0


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop = _Stop()

    def request(number: int, _: object) -> None:
        if not stop.requested:
            stop.requested, stop.since = True, time.monotonic()
            logger.info("%s: stopping at the end of this batch", signal.Signals(number).name)

    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Rank:
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


class _Lead(_Rank):
    """Rank 0: decides what all ranks do."""

    def __init__(self, ranks: Ranks, config: Config, folder: Path, stop: _Stop) -> None:
        super().__init__(ranks, config)
        self.folder, self.stop = folder, stop
        self.step = 0
        """Batches trained in this run."""
        self.version = 0
        self.parent: int | None = None
        self.unnamed = False
        """Whether the weights were trained further than `version`: the queue has not given their own one yet."""
        self.unsaved = False
        """Whether something was trained since the last checkpoint."""
        self.phases = Phases()
        """Of the next line of metrics."""
        self.checkpoint = newest_checkpoint(folder)
        if self.checkpoint is not None:
            self._resume(self.checkpoint)

    def run(self) -> None:
        """Train from the queue until run.steps batches are done or a signal stops it."""
        from lachesis_learner.exchange import Exchange, ExchangeEnded, refusal

        exchange = Exchange(self.config.queue.address, keys=load_keys(self.config))
        try:
            with MetricsWriter(self.folder, step=self.step) as metrics:
                self._run(exchange, metrics)
        except Stopped:
            logger.info("stopped at version %d, step %d", self.version, self.step)
        except ExchangeEnded as error:
            raise (refusal(error) or error) from error
        finally:
            exchange.close()

    def replay(self, path: Path) -> None:
        """Train the groups of a file in order.

        Raises ConfigError when it can't be read or holds none, or when the run folder is that of a run with a queue.
        """
        if not path.is_file():
            raise ConfigError([f"--replay: no file {path}"])
        if self.checkpoint is not None and self.checkpoint.record.queue is not None:
            raise ConfigError(
                [
                    f"--folder: {self.folder} holds {self.checkpoint.path.name}, a checkpoint of the run with queue "
                    f"{self.checkpoint.record.queue}; expected a folder of its own for --replay"
                ]
            )
        size = self.config.queue.batch_groups
        line = None
        try:
            next(read_groups(path), None)  # before anything is written beside
        except MessageError as error:
            raise ConfigError([f"--replay: {error}"]) from error
        with MetricsWriter(self.folder, step=self.step) as metrics:
            try:
                groups = islice(read_groups(path), self.step * size, None)
                self.phases = Phases()
                while self.step < self.config.run.steps and not self.stop.requested:
                    chosen = tuple(islice(groups, size))
                    if not chosen:
                        break
                    line = self._replay_batch(_recorded(chosen, version=self.step), metrics)
            except MessageError as error:
                raise ConfigError([f"--replay: {error}"]) from error
            if line is None and not self.stop.requested and self.step == 0:
                raise ConfigError([f"--replay: {path} holds no groups"])
        if self.unsaved:
            self._save()
        if line is not None:
            print(json.dumps(line), flush=True)

    def _replay_batch(self, batch: Batch, metrics: MetricsWriter) -> dict[str, Any]:
        phases = self.phases
        trained = self._train(batch, phases)
        self._name(batch.version + 1)
        line = metrics.write(step_line(batch, trained, phases, [], step=self.step, published=self.version))
        self.phases = Phases()
        if self.step % self.config.learner.checkpoint_every == 0:
            with self.phases.phase("checkpoint"):
                self._save()
        return line

    def _run(self, exchange: Exchange, metrics: MetricsWriter) -> None:
        self._await(exchange.connect())
        check_welcome(self.config, exchange.consumer, self.checkpoint)
        if exchange.consumer.state.finished:
            logger.info("the run has finished already; nothing to train")
            return
        self._reserve_first(exchange)
        publication = self._publish_first(exchange)
        self.phases = Phases()
        try:
            while self.step < self.config.run.steps and not self.stop.requested:
                publication = self._batch(exchange, metrics, publication)
            self._await(publication, patient=True)
        except Stopped:
            pass
        if self.unnamed:
            logger.warning("the queue is away: batch %d is lost with this learner, and trained again", self.version)
        elif self.unsaved:
            self._save(queue=exchange.consumer.queue_id)
            self._commit(exchange)
        if not self.unnamed and self.step >= self.config.run.steps:
            self._await(exchange.submit(exchange.consumer.finish, self.version))
            self._await(exchange.submit(exchange.publisher.finish), patient=True)
            logger.info("finished: %d steps, version %d", self.step, self.version)
        self._await(exchange.leave(), patient=True)

    def _publish_first(self, exchange: Exchange) -> Future[Any]:
        """Let actors join and publish the weights at hand: whole, or as a delta to what was published before."""
        from lachesis_learner.published_before import published_before

        size, device = self.ranks.size, self.ranks.device
        layout = self.open_encoder().layout
        files, kept = published_before(self.folder, layout, version=self.version, first=self.parent is None, ranks=size)
        if kept is not None:
            self._all("rebase", {})
            self.rebase(kept.mirror)
        blobs = self._encode(anchor=kept is None)
        opened = exchange.open_publisher(self.config.weights, layout, device=device, files=files, kept=kept)
        self._await(opened, patient=True)
        parent = None if kept is None else kept.newest.version
        return exchange.publish(version=self.version, parent=parent, blobs=blobs)

    def _batch(self, exchange: Exchange, metrics: MetricsWriter, publication: Future[Any]) -> Future[Any]:
        """One batch from the lease to the hand-over of the new version; returns its publication, still under way.

        Its line of metrics is written before the checkpoint, so that no checkpoint holds a step without a line; the
        time of the checkpoint is in the next line.
        """
        consumer, phases = exchange.consumer, self.phases
        # The queue leases a version as soon as it knows it, but actors shall have it before the next one comes.
        with phases.phase("publish_wait"):
            self._await(publication, patient=True)
        with phases.phase("wait"):
            batch = self._await(exchange.submit(consumer.lease, self.version))
        trained = self._train(batch, phases)
        checkpoint_wanted = self._await(exchange.submit(consumer.trained, self.version), patient=True)
        self._name(self._await(exchange.submit(consumer.reserve, self.version), patient=True))
        with phases.phase("encode"):
            blobs = self._encode(anchor=False)
        publication = exchange.publish(version=self.version, parent=self.parent, blobs=blobs)
        metrics.write(step_line(batch, trained, phases, blobs, step=self.step, published=self.version))
        self.phases = Phases()
        if self.step % self.config.learner.checkpoint_every == 0 or checkpoint_wanted:
            with self.phases.phase("checkpoint"):
                self._save(queue=consumer.queue_id)
                self._commit(exchange)
        return publication

    def _name(self, version: int) -> None:
        """The weights that were just trained are `version`."""
        self.parent, self.version, self.unnamed = self.version, version, False

    def _reserve_first(self, exchange: Exchange) -> None:
        """The version under which the weights at hand are published first."""
        from lachesis_transport.client import QueueError

        consumer = exchange.consumer
        if self.checkpoint is not None:
            self.parent = self.checkpoint.record.version
        elif consumer.state.current is not None:
            # A learner that came back before its first checkpoint: these weights are those of version 0.
            self.parent = 0
            logger.info("no checkpoint in %s: starting again from the model, as a child of version 0", self.folder)
        try:
            self.version = self._await(exchange.submit(consumer.reserve, self.parent))
        except QueueError as error:
            if self.checkpoint is None:
                raise
            raise QueueError(
                f"{self.checkpoint.path} is a checkpoint of version {self.parent}, which the queue "
                f"{consumer.queue_id} at {self.config.queue.address} refused as a parent: {error}"
            ) from error

    def _resume(self, checkpoint: Checkpoint) -> None:
        record = checkpoint.record
        if record.ranks != self.ranks.size:
            raise ConfigError(
                [f"learner.ranks: value {self.ranks.size}, expected {record.ranks} to resume {checkpoint.path}"]
            )
        self._all("load", {"folder": str(checkpoint.path)})
        self.trainer.load(checkpoint.path)
        self.step, self.version, self.parent = record.step, record.version, record.parent
        logger.info("resumed from %s: version %d, step %d", checkpoint.path, record.version, record.step)

    def _train(self, batch: Batch, phases: Phases) -> Trained:
        if self.ranks.size > 1:
            self._all("train", batch.to_wire())
        trained = self.trainer.train(batch, phases)
        self.step += 1
        self.unnamed = self.unsaved = True
        return trained

    def _encode(self, *, anchor: bool) -> list[bytes]:
        self._all("encode", {"anchor": anchor})
        return self.encode(anchor=anchor)

    def _save(self, *, queue: str | None = None) -> None:
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

    def _commit(self, exchange: Exchange) -> None:
        assert self.checkpoint is not None
        self._await(
            exchange.submit(exchange.consumer.commit, self.version, str(self.checkpoint.path)),
            patient=True,
        )

    def _all(self, kind: Kind, message: dict[str, Any]) -> None:
        self.ranks.send(kind, pack(message))

    def _await(self, future: Future[T], *, patient: bool = False) -> T:
        """Wait for the trio thread and keep the other ranks company. A signal ends the wait: Stopped, at once or, when
        `patient`, GOODBYE_SECONDS after the signal."""
        while True:
            try:
                return future.result(TICK_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
            if self.stop.requested and (not patient or time.monotonic() > self.stop.since + GOODBYE_SECONDS):
                raise Stopped
            self.ranks.send("tick")


def _recorded(groups: tuple[Group, ...], *, version: int) -> Batch:
    versions = {v for group in groups for v in group.versions}
    scores = Scores()
    for group in groups:
        scores += Scores.of([t.score for t in group.trajectories])
    return Batch(
        version=version,
        groups=groups,
        distances={v: max(0, version - v) if v > 0 else 0 for v in versions},
        scores=scores,
    )
