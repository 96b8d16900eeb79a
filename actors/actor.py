"""The actor role: one vLLM server with its gateway, its trajectory API and its environments.

One nursery holds everything: the queue's client, the engine, the follower of published weights, the HTTP server, and a
child process for each environment. Whatever fails ends the role with its cause; a stop (SIGTERM, SIGINT) ends the
children, hands the tickets back and ends with 0, and so does the end of the run once every environment has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hypercorn.config
import hypercorn.trio
import trio
from starlette.applications import Starlette

from lachesis_actors.activity import Activity
from lachesis_actors.child import open_child
from lachesis_actors.engine import Engine, open_engine
from lachesis_actors.gateway import Gateway
from lachesis_actors.provenance import Provenance
from lachesis_actors.runner_routes import RunnerRoutes
from lachesis_actors.tickets import Tickets
from lachesis_actors.trajectory_api import TrajectoryApi
from lachesis_actors.weight_client import follow_weights
from lachesis_configs.load import dump_config
from lachesis_configs.models import resolve_model
from lachesis_configs.schema import Config, Environment
from lachesis_transport.keys import load_keys
from lachesis_transport.producer import Producer, open_producer

logger = logging.getLogger("lachesis.actor")

REPORT_SECONDS = 5.0
HANDBACK_SECONDS = 5.0
SEED_STRIDE = 1_000_003
"""Engines differ in their seeds by this, so that they sample different answers."""


class ActorError(RuntimeError):
    """The actor can't go on. The text names the part and its cause."""


class Actor:
    """The parts of one actor that share state; `run_actor` runs them."""

    def __init__(self, *, config: Config, folder: Path, name: str, producer: Producer) -> None:
        self.config = config
        self.folder = folder
        self.name = name
        self.producer = producer
        self.tickets = Tickets()
        self.provenance = Provenance()
        self.activity = Activity(now=time.time())
        self.gateway = Gateway(
            model=config.model.path,
            max_model_len=config.actor.engine.max_model_len,
            tickets=self.tickets,
            provenance=self.provenance,
            activity=self.activity,
        )
        self.api = TrajectoryApi(
            config=config,
            actor=name,
            folder=folder,
            producer=producer,
            tickets=self.tickets,
            provenance=self.provenance,
        )
        self.runner = RunnerRoutes(
            actor=name, api=self.api, producer=producer, tickets=self.tickets, provenance=self.provenance
        )
        self._reported: Counter[str] = Counter()

    def application(self) -> Starlette:
        """All HTTP routes."""
        return Starlette(routes=[*self.gateway.routes(), *self.api.routes(), *self.runner.routes()])

    def active(self, engine: Engine, version: int) -> None:
        """The engine serves `version`."""
        self.producer.serving(version)
        self.api.serve(version)
        self.gateway.open(engine)

    async def serve_http(self, port: int, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve on 127.0.0.1, `port` or a free one; started with the url."""
        settings = hypercorn.config.Config()
        settings.bind = [f"127.0.0.1:{port}"]
        settings.keep_alive_timeout = 600
        settings.graceful_timeout = 1
        settings.accesslog = None
        settings.errorlog = logging.getLogger("lachesis.http")
        settings.errorlog.setLevel(logging.WARNING)
        async with trio.open_nursery() as nursery:
            urls: list[str] = await nursery.start(hypercorn.trio.serve, self.application(), settings)
            task_status.started(urls[0])

    async def report(self) -> None:
        """Report activity and refusals every few seconds."""
        while True:
            await trio.sleep(REPORT_SECONDS)
            self.report_once()

    def report_once(self) -> None:
        """Report what happened since the last time."""
        self.producer.report("activity", **self.activity.drain(now=time.time()))
        refused = Counter(self.api.refused) + Counter(self.gateway.refused)
        for reason, count in (refused - self._reported).items():
            self.producer.report("refused", reason=reason, count=count)
        self._reported = refused

    async def follow(self, engine: Engine, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the engine at the newest published version; started when it serves the first one."""
        engine.on_pause = lambda paused: self.activity.pause(paused, now=time.time())
        await follow_weights(
            config=self.config,
            actor=self.name,
            engine=engine,
            report=self.producer.report,
            on_active=lambda version: self.active(engine, version),
            task_status=task_status,
        )

    async def run_environments(self, url: str, *, config_path: Path) -> None:
        """Run every environment until all have ended with 0 after the run finished. Raises ActorError otherwise."""
        async with trio.open_nursery() as nursery:
            for environment in self.config.environments:
                nursery.start_soon(self._run_environment, environment, url, config_path)

    async def _run_environment(self, environment: Environment, url: str, config_path: Path) -> None:
        log_path = self.folder / "logs" / f"{self.name}-{environment.name}.log"
        command = environment_command(environment, url=url, config_path=config_path, folder=self.folder)
        logger.info("starting environment %s (log: %s)", environment.name, log_path)
        async with open_child(command, log_path=log_path, env=environment_variables(os.environ)) as child:
            status = await child.wait()
            if status != 0:
                raise ActorError(
                    f"environment {environment.name} ended with status {status}; the end of {log_path}:\n{child.tail()}"
                )
            if not self.producer.state.finished:
                raise ActorError(f"environment {environment.name} ended before the run did (log: {log_path})")
        logger.info("environment %s has ended", environment.name)

    async def hand_back(self) -> None:
        """Void the tickets whose groups won't come any more."""
        with trio.move_on_after(HANDBACK_SECONDS, shield=True):
            for ticket in self.tickets.everything_live():
                self.tickets.end(ticket)
                await self.producer.void(ticket, "actor_stopped")


def environment_command(environment: Environment, *, url: str, config_path: Path, folder: Path) -> list[str]:
    """The command line of one environment's process."""
    return [
        *(sys.executable, "-m", "lachesis", "environment", str(config_path)),
        *("--name", environment.name, "--url", url, "--folder", str(folder)),
    ]


def environment_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """An environment's process computes next to nothing: it must not start a thread a core for it."""
    return {**inherited, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}


def actor_gpus(config: Config, index: int) -> list[int] | None:
    """The CUDA devices of actor `index`, None where the config names none. Raises ActorError when there are too few."""
    if config.actor.gpus is None:
        return None
    each = config.actor.engine.tensor_parallel
    gpus = config.actor.gpus[index * each : (index + 1) * each]
    if len(gpus) != each:
        raise ActorError(
            f"actor.gpus: {config.actor.gpus}, expected at least {(index + 1) * each} devices for actor {index}"
        )
    return gpus


def engine_seed(config: Config, index: int) -> int:
    """The seed of actor `index`'s engine. Its environments have the run's seed: they share the order of items."""
    return config.run.seed + SEED_STRIDE * index


@asynccontextmanager
async def _until_signalled() -> AsyncIterator[trio.CancelScope]:
    """Cancel the block on SIGTERM or SIGINT."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals, trio.CancelScope() as scope:

        async def watch() -> None:
            async for number in signals:
                logger.info("%s: ending the environments and handing the tickets back", signal.Signals(number).name)
                scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            yield scope
            nursery.cancel_scope.cancel()


def _the_cause(group: BaseExceptionGroup[Any]) -> BaseException:
    """The one exception in a group of groups, or the group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def run_actor(config: Config, folder: Path, index: int) -> None:
    """Run actor `index` of a run until the run has finished or a signal ends it.

    Writes logs/ACTOR-*.log and ACTOR/config.yaml in the run folder. Returns when every environment has ended after the
    run finished, or after SIGTERM or SIGINT. Raises the cause when a part fails: EngineError, ActorError, QueueError,
    ActivationFailed.
    """
    name = f"actor-{index}"
    try:
        async with _until_signalled():
            await _run(config, folder, name, index)
    except BaseExceptionGroup as group:
        cause = _the_cause(group)
        if cause is group:
            raise
        raise cause from None


async def _run(config: Config, folder: Path, name: str, index: int) -> None:
    gpus = actor_gpus(config, index)
    model_path = await trio.to_thread.run_sync(resolve_model, config.model.path)
    config_path = folder / name / "config.yaml"
    config_path.parent.mkdir(parents=True, exist_ok=True)
    config_path.write_text(dump_config(config), encoding="utf-8")
    async with open_producer(config.queue.address, name, uuid.uuid4().hex, load_keys(config)) as producer:
        actor = Actor(config=config, folder=folder, name=name, producer=producer)
        producer.report("started", pid=os.getpid())
        try:
            async with trio.open_nursery() as nursery:
                port = config.actor.port + index if config.actor.port else 0
                url = await nursery.start(actor.serve_http, port)
                logger.info("%s answers on %s", name, url)
                async with open_engine(
                    config.actor.engine,
                    model_path=model_path,
                    log_path=folder / "logs" / f"{name}-vllm.log",
                    seed=engine_seed(config, index),
                    gpus=gpus,
                    kv=config.activation.kv,
                ) as engine:
                    # Inside of the engine's block: when vLLM dies, that is the cause, not the connections it breaks.
                    async with trio.open_nursery() as users:
                        await users.start(actor.follow, engine)
                        users.start_soon(actor.report)
                        await actor.run_environments(url, config_path=config_path)
                        users.cancel_scope.cancel()
                logger.info("%s: the run has finished and every environment has ended", name)
                actor.report_once()
                nursery.cancel_scope.cancel()
        finally:
            await actor.hand_back()
            producer.report("stopped")
