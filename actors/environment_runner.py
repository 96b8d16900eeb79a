"""The process of one environment: a stock Atropos BaseEnv, paced by tickets.

Lachesis runs its own loop in place of BaseEnv.env_manager, which paces by queue length, cancels running groups on
excess and exits when its server is away for two seconds. Here a group starts when its ticket was issued, which names
its item by number; it is one call of handle_env, and is never cancelled before the run ends. The order is: evaluate at
the first version served, train until the queue has finished, evaluate at the final version.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import signal
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from atroposlib.envs.base import BaseEnv

from lachesis_actors.environment_items import EnvironmentItems
from lachesis_actors.environment_loading import check_options, load_environment, make_environment
from lachesis_actors.environment_routes import ActorGone, ActorRefused, ActorRoutes
from lachesis_actors.environment_shims import lists_from_chat_templates, stamp_requests
from lachesis_configs.models import resolve_model
from lachesis_configs.schema import Config, Environment

logger = logging.getLogger("lachesis.environment")

FINAL_SECONDS = 300.0
"""How long the final evaluation waits for the actor to serve the final version."""
WATCH_SECONDS = 1.0
"""How often the run's progress is asked for."""
RELEASE_SECONDS = 5.0
"""Deadline for handing back the ticket of a cancelled group."""
NO_ITEM_SECONDS = 1.0
"""Pause before an environment that had no item is asked again."""
LONGEST_PAUSE = 10.0
"""Pause between groups, in seconds, when all that an environment started lately has failed."""
TIMINGS_KEPT = 1000


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """A group under way."""

    ticket: int
    sent: int = 0
    """Groups that the actor took."""
    reason: str | None = None
    """Why there is none, when something went wrong."""


_LIVE: ContextVar[Live | None] = ContextVar("lachesis_live", default=None)
_SPLIT: ContextVar[str | None] = ContextVar("lachesis_split", default=None)


def request_headers() -> dict[str, str]:
    """Headers of an inference request made in the current context: the ticket it belongs to, and its split."""
    live, split = _LIVE.get(), _SPLIT.get()
    headers = {"X-Lachesis-Split": split} if split else {}
    return headers if live is None else {**headers, "X-Lachesis-Ticket": str(live.ticket)}


def run_environment(config: Config, environment: Environment, url: str, folder: Path) -> int:
    """Run `environment` against the actor at `url` (its gateway and trajectory API) until the queue has finished.

    SIGTERM and SIGINT hand back the tickets and end it. Returns the exit code: 0, or 1 when the actor was away for too
    long. Raises ConfigError for an environment that can't be made, and whatever the environment's own set-up raises.
    """
    logging.getLogger("atroposlib.envs.base").setLevel(logging.WARNING)
    try:
        return asyncio.run(_until_stopped(config, environment, url.rstrip("/"), folder))
    except ActorGone as error:
        logger.error("%s", error)
        return 1


async def _until_stopped(config: Config, environment: Environment, url: str, folder: Path) -> int:
    loop = asyncio.get_running_loop()
    running = loop.create_task(_run(config, environment, url, folder))
    stopped: list[str] = []

    def stop(name: str) -> None:
        stopped.append(name)
        running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
        logger.info("stopped by %s", stopped[0])
    return 0


async def _run(config: Config, environment: Environment, url: str, folder: Path) -> None:
    # Whatever the environment shuffles while it is made and set up comes out the same in every actor.
    seed = _seed(f"{config.run.seed}/{environment.name}")
    _seed_globally(seed)
    lists_from_chat_templates()
    stamp_requests(url, request_headers)
    kind = load_environment(environment.path, key=f"environments.{config.environments.index(environment)}.path")
    check_options(kind, environment, config)
    async with ActorRoutes(url) as routes:
        actor = await _served(routes)
        model = resolve_model(config.model.path)
        env = make_environment(kind, environment, config, url=url, model=model, seed=seed, folder=folder)
        own_seed = _seed(f"{config.run.seed}/{environment.name}/{actor}")
        await EnvironmentRunner(env, routes, config=config, environment=environment, own_seed=own_seed).run()


async def _served(routes: ActorRoutes) -> str:
    """Wait until the actor serves a published version. Returns the actor's name."""
    waiting = False
    while (state := await routes.state())["version"] is None:
        if not waiting:
            logger.info("waiting for the actor to serve a policy version")
        waiting = True
        await asyncio.sleep(0.2)
    return str(state["actor"])


def _seed(name: str) -> int:
    """32 bits that depend on the whole name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def _seed_globally(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


class EnvironmentRunner:
    """One environment's loop. `own_seed` seeds Python's and NumPy's global generators once the set-up is done."""

    def __init__(
        self, env: BaseEnv, routes: ActorRoutes, *, config: Config, environment: Environment, own_seed: int
    ) -> None:
        self._env = env
        self._routes = routes
        self._config = config
        self._environment = environment
        self._own_seed = own_seed
        self._workers: set[asyncio.Task[None]] = set()
        self._evaluation: asyncio.Task[None] | None = None
        self._logged: dict[str, Any] = {}
        self._failures = 0
        env.collect_trajectories = self._noting_failure(env.collect_trajectories)
        env.postprocess_histories = self._noting_failure(env.postprocess_histories)
        env._send_scored_data_to_api = self._send
        self._evaluate_log = env.evaluate_log
        env.evaluate_log = self._log_evaluation

    async def run(self) -> None:
        """Evaluate, train until the queue has finished, evaluate. Cancellation hands back what is live."""
        env = self._env
        await env.setup()
        await env.setup_wandb()
        await env.register_env()
        _seed_globally(self._own_seed)
        self._items = EnvironmentItems(env)
        # BaseEnv drops sequences of this length as too long: those of exactly max_token_length are wanted.
        env.max_token_len = self._environment.max_token_length + 1
        await asyncio.create_task(self._evaluate())
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(group))
                await self._train(group)
                # Nothing that is still under way can be trained any more; the final evaluation follows.
                for task in (watch, *self._workers, *([self._evaluation] if self._evaluation else [])):
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        await self._wait_for_the_final_version()
        await asyncio.create_task(self._evaluate())

    async def _train(self, group: asyncio.TaskGroup) -> None:
        while True:
            while len(self._workers) >= self._environment.workers:
                await asyncio.wait(self._workers, return_when=asyncio.FIRST_COMPLETED)
            if self._failures:
                await asyncio.sleep(min(LONGEST_PAUSE, 0.05 * 2 ** min(self._failures, 10)))
            ticket = await self._routes.ticket(self._environment.name)
            if ticket is None:
                logger.info("the queue has finished")
                return
            live = Live(ticket=ticket.ticket)
            try:
                item = await self._items.get(ticket.item)
            except BaseException as error:
                await self._hand_back(live, "cancelled" if isinstance(error, asyncio.CancelledError) else "failed")
                raise
            if item is None:
                logger.info("the environment has no item %d; asking again in %g s", ticket.item, NO_ITEM_SECONDS)
                await self._routes.release(live.ticket, "no_item")
                await asyncio.sleep(NO_ITEM_SECONDS)
                continue
            worker = group.create_task(self._work(item, live))
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _work(self, item: Any, live: Live) -> None:
        """One group, from its ticket to the ticket's release."""
        _LIVE.set(live)
        _SPLIT.set("train")
        env, key = self._env, str(uuid.uuid4())
        env.running_items[key] = {"item": item, "worker": asyncio.current_task(), "start_time": time.time()}
        try:
            if await env.handle_env(key):
                env.last_completed_item = item
        except asyncio.CancelledError:
            await self._hand_back(live, "cancelled")
            raise
        except (ActorGone, ActorRefused):
            raise
        except Exception:
            self._failed(live, "the environment failed in handle_env")
        finally:
            env.running_items.pop(key, None)
        self._failures = 0 if live.sent else self._failures + (live.reason == "failed")
        reason = "scored" if live.sent else live.reason or "dropped_by_environment"
        await self._routes.release(live.ticket, reason)

    async def _hand_back(self, live: Live, reason: str) -> None:
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._routes.release(live.ticket, reason)
        except (TimeoutError, ActorGone, ActorRefused) as error:
            # The actor voids what a process that ended still held.
            logger.warning("ticket %d could not be handed back: %s", live.ticket, error or "no answer")

    def _noting_failure(self, step: Any) -> Any:
        """BaseEnv catches what its steps raise and goes on: say so, and why."""

        async def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return await step(*args, **kwargs)
            except Exception:
                if live := _LIVE.get():
                    self._failed(live, f"the environment failed in {step.__name__}")
                raise

        return noted

    def _failed(self, live: Live, text: str) -> None:
        live.reason = "failed"
        # A broken environment fails often: the traceback once in a while is enough.
        if self._failures & (self._failures - 1) == 0:
            logger.exception("%s (%d in a row before)", text, self._failures)

    async def _send(self, scored: Any) -> None:
        """In place of BaseEnv's sender, which gives up after three tries."""
        live = _LIVE.get()
        groups = scored if isinstance(scored, list) else [scored]
        for one in groups:
            one["env_id"] = getattr(self._env, "env_id", None)
            if live is not None:
                one["group_overrides"] = {**(one.get("group_overrides") or {}), "lachesis_ticket": live.ticket}
        try:
            await self._routes.scored(scored)
        except ActorRefused as error:
            logger.error("a scored group was refused: %s", error)
            if live is not None:
                live.reason = "refused"
            return
        if live is not None:
            live.sent += len(groups)

    async def _watch(self, group: asyncio.TaskGroup) -> None:
        """Follow the run's progress: the environment's own metrics, and evaluations in between."""
        every, steps = self._config.run.evaluate_every, self._config.run.steps
        step = int((await self._routes.state())["step"])
        while True:
            self._tell(step)
            await asyncio.sleep(WATCH_SECONDS)
            before, step = step, int((await self._routes.state())["step"])
            if step == before:
                continue
            evaluating = self._evaluation is not None and not self._evaluation.done()
            if not evaluating:
                await self._log_step()
            if every and step // every > before // every and step < steps:
                if evaluating:
                    logger.info("step %d: the last evaluation is still running, none is started", step)
                else:
                    self._evaluation = group.create_task(self._evaluate())

    def _tell(self, step: int) -> None:
        """What BaseEnv's own loop would know."""
        env = self._env
        env.curr_step = step
        env.status_dict = {
            "current_step": step,
            "queue_size": 0,
            "self_queue_size": 0,
            "max_group_size": self._environment.group_size,
            "unallocated_fraction": 1.0,
            "env_weight": 1.0,
        }

    async def _log_step(self) -> None:
        env = self._env
        if env.items_sent_this_step >= env.config.min_items_sent_before_logging:
            env.items_sent_this_step = 0
            try:
                await env.wandb_log({})
            except Exception:
                logger.exception("the environment's wandb_log failed; its metrics of this step are lost")
        # What else BaseEnv appends to for ever.
        env.task_successful.clear()
        for server in env.server.servers:
            for kept in (server.request_timings, server.attempts_list):
                del kept[:-TIMINGS_KEPT]

    async def _evaluate(self) -> None:
        """One evaluation, with the version that all its requests saw, or null when that changed on the way."""
        _LIVE.set(None)
        _SPLIT.set("eval")
        env, started = self._env, time.monotonic()
        before = (await self._routes.state())["version"]
        appended = len(getattr(env, "eval_metrics", []))
        self._logged = {}
        try:
            answer = await env.evaluate()
        except (ActorGone, ActorRefused):
            raise
        except Exception:
            logger.exception("the environment's evaluation failed; training goes on")
            return
        after = (await self._routes.state())["version"]
        metrics = evaluation_metrics(answer, self._logged, getattr(env, "eval_metrics", [])[appended:])
        if not metrics:
            logger.info("the evaluation gave no metrics")
            return
        version = before if before == after else None
        await self._routes.evaluation(self._environment.name, metrics, version)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        at = f"version {version}" if version is not None else f"versions {before} to {after}"
        logger.info("evaluation at %s in %.1f s: %s", at, time.monotonic() - started, shown)

    async def _log_evaluation(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self._logged.update(metrics)
        if self._env.config.data_dir_to_save_evals is not None:
            await self._evaluate_log(metrics, *args, **kwargs)

    async def _wait_for_the_final_version(self) -> None:
        deadline = time.monotonic() + FINAL_SECONDS
        while not (state := await self._routes.state())["served_final"]:
            if time.monotonic() > deadline:
                logger.warning(
                    "version %s is still served %g s after the queue has finished with %s: evaluating that",
                    state["version"],
                    FINAL_SECONDS,
                    state["final"],
                )
                return
            await asyncio.sleep(0.2)


def evaluation_metrics(answer: Any, logged: dict[str, Any], appended: list[Any]) -> dict[str, float]:
    """The finite numbers of an evaluation: what evaluate() returned, what it gave to evaluate_log, and what it appended
    to `eval_metrics` as pairs, as many environments do. The main one is called accuracy, whatever it was called."""
    pairs = {entry[0]: entry[1] for entry in appended if isinstance(entry, (tuple, list)) and len(entry) == 2}
    found = {**pairs, **logged, **(answer if isinstance(answer, dict) else {})}
    metrics = {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, (int, float, np.number)) and math.isfinite(value)
    }
    if metrics and "accuracy" not in metrics:
        names = {name.rsplit("/", 1)[-1].lower(): name for name in reversed(metrics)}
        main = next((names[n] for n in ("accuracy", "percent_correct", "acc", "pass@1", "score") if n in names), None)
        if main is not None:
            metrics = {"accuracy": metrics[main], **metrics}
    return metrics
