"""`lachesis learner`: lease a batch, train it on all ranks, publish the new policy, checkpoint; until the run is done.

Rank 0 leads on its main thread; its input and output run in a trio thread beside it. SIGTERM and SIGINT are honoured
at the next batch boundary: the batch at hand is finished and checkpointed, what is leased is handed back.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lachesis_configs.load import dump_config
from lachesis_configs.models import resolve_model
from lachesis_configs.schema import Config
from lachesis_learner.lead import Lead, Rank
from lachesis_learner.metrics import MetricsWriter, Phases, step_line
from lachesis_learner.ranks import TICK_SECONDS, Ranks, prepare_process
from lachesis_learner.replay import replay_groups
from lachesis_learner.stop import Stop, Stopped, stop_signals
from lachesis_learner.welcome import check_welcome
from lachesis_transport.keys import load_keys

if TYPE_CHECKING:
    from lachesis_learner.exchange import Exchange

logger = logging.getLogger("lachesis.learner")

T = TypeVar("T")

GOODBYE_SECONDS = 10.0
"""What a stop grants the queue to answer, and the end the publisher's members."""


def run_learner(config: Config, folder: Path, *, rank: int = 0, replay: Path | None = None) -> int:
    """Run one rank of the learner to its end; returns the exit code. Rank 0 starts the others.

    Args:
        folder: the run folder: metrics.jsonl, tensorboard/, checkpoints/.
        replay: a file of groups to train in order instead of leasing (`replay_groups`).

    Raises ConfigError for what a user can mend, RankDied, QueueError, NonFiniteInput and their like for a failed run.
    """
    device, size = prepare_process(config.learner, rank=rank), config.learner.ranks
    if rank:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # rank 0 gets them too and says when to stop
        Rank(Ranks.follow(device=device, rank=rank, size=size), config).obey()
        return 0
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(resolve_model(config.model.path))})}
    )
    command: list[str] = []
    if size > 1:
        path = folder / "learner.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "lachesis", "learner", str(path), "--folder", str(folder)]
    with stop_signals() as stop:
        ranks = Ranks.lead(device=device, size=size, command=command)
        failed = True
        try:
            lead = Lead(ranks, config, folder)
            if replay is not None:
                replay_groups(lead, replay, stop)
            else:
                _train_from_queue(lead, stop)
            ranks.send("stop")
            failed = False
        except RuntimeError as error:
            ranks.explain(error)
            raise
        finally:
            ranks.close(failed=failed)
    return 0


def _train_from_queue(lead: Lead, stop: Stop) -> None:
    """Train from the queue until run.steps batches are done or a signal stops it."""
    from lachesis_learner.exchange import Exchange, ExchangeEnded, refusal

    exchange = Exchange(lead.config.queue.address, keys=load_keys(lead.config))
    try:
        with MetricsWriter(lead.folder, step=lead.step) as metrics:
            _QueueRun(lead, exchange, metrics, stop).run()
    except Stopped:
        logger.info("stopped at version %d, step %d", lead.version, lead.step)
    except ExchangeEnded as error:
        raise (refusal(error) or error) from error
    finally:
        exchange.close()


class _QueueRun:
    """Rank 0 between the queue and the actors."""

    def __init__(self, lead: Lead, exchange: Exchange, metrics: MetricsWriter, stop: Stop) -> None:
        self.lead, self.exchange, self.metrics, self.stop = lead, exchange, metrics, stop
        self.config = lead.config
        self.phases = Phases()
        """Of the next line of metrics."""

    def run(self) -> None:
        """From the greeting to the goodbye. Raises Stopped when a signal came meanwhile."""
        lead, exchange, steps = self.lead, self.exchange, self.config.run.steps
        self._await(exchange.connect())
        check_welcome(self.config, exchange.consumer, lead.checkpoint)
        if exchange.consumer.state.finished:
            logger.info("the run has finished already; nothing to train")
            return
        self._reserve_first()
        publication = self._publish_first()
        self.phases = Phases()
        try:
            while lead.step < steps and not self.stop.requested:
                publication = self._batch(publication)
            self._await(publication, patient=True)
        except Stopped:
            pass
        if lead.unnamed:
            logger.warning("the queue is away: batch %d is lost with this learner, and trained again", lead.version)
        elif lead.unsaved:
            self._checkpoint()
        if not lead.unnamed and lead.step >= steps:
            self._await(exchange.submit(exchange.consumer.finish, lead.version))
            self._await(exchange.submit(exchange.publisher.finish), patient=True)
            logger.info("finished: %d steps, version %d", lead.step, lead.version)
        self._await(exchange.leave(), patient=True)

    def _reserve_first(self) -> None:
        """The version under which the weights at hand are published first."""
        from lachesis_transport.client import QueueError

        lead, consumer = self.lead, self.exchange.consumer
        if lead.checkpoint is not None:
            lead.parent = lead.checkpoint.record.version
        elif consumer.state.current is not None:
            # A learner that came back before its first checkpoint: these weights are those of version 0.
            lead.parent = 0
            logger.info("no checkpoint in %s: starting again from the model, as a child of version 0", lead.folder)
        try:
            lead.version = self._await(self.exchange.submit(consumer.reserve, lead.parent))
        except QueueError as error:
            if lead.checkpoint is None:
                raise
            raise QueueError(
                f"{lead.checkpoint.path} is a checkpoint of version {lead.parent}, which the queue "
                f"{consumer.queue_id} at {self.config.queue.address} refused as a parent: {error}"
            ) from error

    def _publish_first(self) -> Future[Any]:
        """Let actors join and publish the weights at hand: whole, or as a delta to what was published before."""
        from lachesis_learner.published_before import published_before

        lead, size = self.lead, self.lead.ranks.size
        layout = lead.open_encoder().layout
        files, kept = published_before(lead.folder, layout, version=lead.version, first=lead.parent is None, ranks=size)
        if kept is not None:
            lead.rebase(kept.mirror)
        blobs = lead.encode(anchor=kept is None)
        device = lead.ranks.device
        opened = self.exchange.open_publisher(self.config.weights, layout, device=device, files=files, kept=kept)
        self._await(opened, patient=True)
        parent = None if kept is None else kept.newest.version
        return self.exchange.publish(version=lead.version, parent=parent, blobs=blobs)

    def _batch(self, publication: Future[Any]) -> Future[Any]:
        """One batch from the lease to the hand-over of the new version; returns its publication, still under way.

        Its line of metrics is written before the checkpoint, so that no checkpoint holds a step without a line; the
        time of the checkpoint is in the next line.
        """
        lead, exchange, consumer, phases = self.lead, self.exchange, self.exchange.consumer, self.phases
        # The queue leases a version as soon as it knows it, but actors shall have it before the next one comes.
        with phases.phase("publish_wait"):
            self._await(publication, patient=True)
        with phases.phase("wait"):
            batch = self._await(exchange.submit(consumer.lease, lead.version))
        trained = lead.train(batch, phases)
        checkpoint_wanted = self._await(exchange.submit(consumer.trained, lead.version), patient=True)
        lead.name(self._await(exchange.submit(consumer.reserve, lead.version), patient=True))
        with phases.phase("encode"):
            blobs = lead.encode(anchor=False)
        publication = exchange.publish(version=lead.version, parent=lead.parent, blobs=blobs)
        self.metrics.write(step_line(batch, trained, phases, blobs, step=lead.step, published=lead.version))
        self.phases = Phases()
        if lead.step % self.config.learner.checkpoint_every == 0 or checkpoint_wanted:
            with self.phases.phase("checkpoint"):
                self._checkpoint()
        return publication

    def _checkpoint(self) -> None:
        """Write a checkpoint and tell the queue of it."""
        lead, consumer = self.lead, self.exchange.consumer
        path = lead.save(queue=consumer.queue_id).path
        self._await(self.exchange.submit(consumer.commit, lead.version, str(path)), patient=True)

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
            self.lead.ranks.send("tick")
