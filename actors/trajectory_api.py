"""The HTTP interface of Atropos 0.4.0 for environments, and the routes of Lachesis's environment runner.

What an environment posts becomes a group of the replay queue: its log-probs and versions come from the provenance, its
advantages from the environment or from its scores. A malformed group is answered with a 4xx, which Atropos's client
does not retry; nothing here answers 5xx, because that client would then double or lose the group. While the queue is
away the answer waits.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lachesis_actors.advantages import AdvantageError, NoVariance
from lachesis_actors.http_request import Refusal, read_json, take_field
from lachesis_actors.provenance import Provenance, ProvenanceError
from lachesis_actors.scored_data import TICKET_KEY, ScoredDataError, ScoredGroup, parse_group
from lachesis_actors.tickets import Tickets
from lachesis_actors.trajectories import make_trajectories
from lachesis_configs.schema import Config
from lachesis_transport.client import QueueError
from lachesis_transport.messages import Group, MessageError, Scores, Trajectory
from lachesis_transport.producer import Finished, Producer

logger = logging.getLogger("lachesis.trajectories")

HELD_POSTS = 64
"""Posts whose bodies are in memory at once; further ones wait unread."""

MAX_BODY = 64 << 20
"""Bytes of one post, after decompression."""

BATCH_SIZE = 1 << 20
"""Answered by /info: Atropos bounds an environment's workers by the trainer's batch size, and here only the
environment's own number of workers and the tickets bound them."""

MAX_ENVIRONMENTS = 1024

ANSWERS_KEPT = 4096
"""Answers to posts that are remembered, so that a group that is posted again (its answer was lost) is queued once."""


class TrajectoryApi:
    """The trajectory routes of one actor."""

    def __init__(
        self,
        *,
        config: Config,
        actor: str,
        folder: Path,
        producer: Producer,
        tickets: Tickets,
        provenance: Provenance,
    ) -> None:
        self._config = config
        self._actor = actor
        self._folder = folder
        self._producer = producer
        self._tickets = tickets
        self._provenance = provenance
        self._opened = trio.Event()
        self._held = trio.CapacityLimiter(HELD_POSTS)
        self._posting: dict[str, trio.Lock] = {}
        self._environments: list[dict[str, Any]] = []
        self._latest: dict[str, Any] | None = None
        self._answered: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self.version: int | None = None
        """Policy version that the engine serves."""
        self.refused: Counter[str] = Counter()
        """Groups that were refused, by reason."""
        self.counts: Counter[str] = Counter()
        """Groups by what became of them: accepted, duplicate, stale, invalid, no_variance, finished (the run was over);
        trimmed counts unsampled tokens at the end of a turn that lost their mask."""

    def serve(self, version: int) -> None:
        """The engine now serves `version`; the first time lets environments register and take tickets."""
        self.version = version
        self._opened.set()

    async def first_version(self) -> int:
        """The version that the engine serves, waiting for the first."""
        await self._opened.wait()
        assert self.version is not None
        return self.version

    def routes(self) -> list[Route]:
        """For a starlette application."""
        return [
            Route("/", self._root, methods=["GET"]),
            Route("/register-env", self.guarded(self._register_env), methods=["POST"]),
            Route("/disconnect-env", self.guarded(self._disconnect_env), methods=["POST"]),
            Route("/scored_data", self.guarded(self._scored_data, held=True), methods=["POST"]),
            Route("/scored_data_list", self.guarded(self._scored_data_list, held=True), methods=["POST"]),
            Route("/status", self._status, methods=["GET"]),
            Route("/status-env", self.guarded(self._status_env), methods=["GET"]),
            Route("/info", self._info, methods=["GET"]),
            Route("/wandb_info", self._wandb_info, methods=["GET"]),
            Route("/latest_example", self._latest_example, methods=["GET"]),
            Route("/reset_data", self._no_reset, methods=["GET", "POST"]),
            Route("/register", self._no_trainer, methods=["POST"]),
            Route("/batch", self._no_trainer, methods=["GET"]),
        ]

    def guarded(
        self, serve: Callable[[Request, Any], Awaitable[dict[str, Any]]], *, held: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that reads a JSON body and answers a Refusal as what it is. `held`: it may wait for the queue, so
        only HELD_POSTS of them have their bodies in memory."""

        async def endpoint(request: Request) -> Response:
            try:
                if not held:
                    return JSONResponse(await serve(request, await read_json(request, max_bytes=MAX_BODY)))
                async with self._held:
                    return JSONResponse(await serve(request, await read_json(request, max_bytes=MAX_BODY)))
            except Refusal as refusal:
                self.refused[refusal.reason] += 1
                logger.warning("%s refused: %s", request.url.path, refusal)
                detail = {"detail": str(refusal), "reason": refusal.reason}
                return JSONResponse(detail, status_code=refusal.status)

        return endpoint

    # Atropos's routes

    async def _root(self, request: Request) -> Response:
        return JSONResponse({"message": "AtroposLib API"})

    async def _register_env(self, request: Request, body: Any) -> dict[str, Any]:
        if not self._opened.is_set():
            return {"status": "wait for trainer to start"}
        name = take_field(body, "desired_name", str, default="environment")
        group_size = take_field(body, "group_size", int)
        if len(self._environments) >= MAX_ENVIRONMENTS:
            raise Refusal("environments", f"{MAX_ENVIRONMENTS} environments are registered already", status=409)
        index = len(self._environments)
        same = sum(1 for e in self._environments if e["name"] == name)
        self._environments.append({"name": name, "group_size": group_size, "connected": True})
        return {
            "status": "success",
            "env_id": index,
            "wandb_name": f"{name}_{same}",
            "checkpoint_dir": str(self._folder / self._actor),
            # Not the learner's step: Atropos loads an environment checkpoint when this is above 0.
            "starting_step": 0,
            "checkpoint_interval": 0,
            "num_steps": self._producer.welcome.steps,
        }

    async def _disconnect_env(self, request: Request, body: Any) -> dict[str, Any]:
        environment = self._environment(body)
        environment["connected"] = False
        return {"status": "success"}

    def _environment(self, body: Any) -> dict[str, Any]:
        index = take_field(body, "env_id", int)
        if not 0 <= index < len(self._environments):
            raise Refusal("env_id", f"env_id: {index} is not registered on this actor", status=404)
        return self._environments[index]

    async def _status(self, request: Request) -> Response:
        return JSONResponse({"current_step": self._producer.state.step, "queue_size": 0})

    async def _status_env(self, request: Request, body: Any) -> dict[str, Any]:
        environment = self._environment(body)
        return {
            "current_step": self._producer.state.step,
            # Pacing is the tickets' business: a queue that looks empty keeps Atropos's own throttle off.
            "queue_size": 0,
            "unallocated_fraction": 1.0,
            "self_queue_size": 0,
            "max_group_size": environment["group_size"],
            "env_weight": 1.0,
        }

    async def _info(self, request: Request) -> Response:
        # Atropos drops groups with a sequence of max_token_len or more: the engine's limit must stay below it.
        return JSONResponse({"batch_size": BATCH_SIZE, "max_token_len": self._config.actor.engine.max_model_len + 1})

    async def _wandb_info(self, request: Request) -> Response:
        return JSONResponse({"group": self._config.run.name, "project": "lachesis"})

    async def _latest_example(self, request: Request) -> Response:
        if self._latest is None:
            names = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params")
            more = ("inference_logprobs", "messages", "images")
            return JSONResponse({name: [] for name in (*names, *more)})
        return JSONResponse(self._latest)

    async def _no_reset(self, request: Request) -> Response:
        return JSONResponse({"detail": "reset_data: not offered, groups are in the replay queue"}, status_code=409)

    async def _no_trainer(self, request: Request) -> Response:
        detail = f"{request.url.path}: not offered, Lachesis's learner takes its batches from the replay queue"
        return JSONResponse({"detail": detail}, status_code=409)

    async def _scored_data(self, request: Request, body: Any) -> dict[str, Any]:
        return (await self._post([body]))[0]

    async def _scored_data_list(self, request: Request, body: Any) -> dict[str, Any]:
        if not isinstance(body, list) or not body:
            raise Refusal("invalid", f"body: {type(body).__name__}, expected a list of groups, not empty")
        answers = await self._post(body)
        return {"status": "received", "groups_processed": len(answers), "groups": answers}

    async def _post(self, bodies: list[Any]) -> list[dict[str, Any]]:
        max_tokens = self._config.actor.engine.max_model_len
        try:
            groups = [parse_group(body, max_tokens=max_tokens) for body in bodies]
        except ScoredDataError as error:
            raise Refusal("invalid", str(error)) from None
        tickets = {group.ticket for group in groups}
        if len(tickets) != 1:
            raise Refusal("invalid", f"group_overrides: tickets {tickets} in one post, expected one")
        ticket = tickets.pop()
        digest = "-".join([str(ticket), *(group.digest() for group in groups)])
        # A post that is sent again while the first one is still held must not run beside it.
        lock = self._posting.setdefault(digest, trio.Lock())
        try:
            async with lock:
                return await self._post_once(ticket, digest, groups, bodies)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._posting.pop(digest, None)

    async def _post_once(
        self, ticket: int | None, digest: str, groups: list[ScoredGroup], bodies: list[Any]
    ) -> list[dict[str, Any]]:
        known = self._answered.get(digest)
        if known is not None:
            return known
        live = None if ticket is None else self._tickets.live(ticket)
        if ticket is not None and live is None:
            raise Refusal("ticket", f"group_overrides.{TICKET_KEY}: {ticket} is not live on this actor", status=409)
        try:
            made = self._make(ticket, groups)
            answers = await self._hand_over(ticket, made, groups)
        except Refusal as refusal:
            if live is not None:
                live.refusal = refusal.reason
            raise
        if ticket is not None:
            self._tickets.end(ticket)
            self._provenance.close(ticket)
        self._answered[digest] = answers
        if len(self._answered) > ANSWERS_KEPT:
            self._answered.popitem(last=False)
        self._latest = bodies[-1]
        return answers

    def _make(self, ticket: int | None, groups: list[ScoredGroup]) -> list[tuple[Trajectory, ...]]:
        """The trajectories of each group; () of one that carries no signal."""
        made: list[tuple[Trajectory, ...]] = []
        for group in groups:
            try:
                trajectories = make_trajectories(
                    group, ticket=ticket, mode=self._config.actor.advantages, provenance=self._provenance
                )
            except NoVariance:
                trajectories = ()
            except AdvantageError as error:
                raise Refusal("advantages", str(error)) from None
            except ProvenanceError as error:
                raise Refusal("mismatch", str(error)) from None
            else:
                posted = sum(int(mask.sum()) for mask in group.masks)
                self.counts["trimmed"] += posted - sum(int(t.mask.sum()) for t in trajectories)
            made.append(trajectories)
        return made

    async def _hand_over(
        self, ticket: int | None, made: list[tuple[Trajectory, ...]], groups: list[ScoredGroup]
    ) -> list[dict[str, Any]]:
        """Put the groups into the queue. Those of an environment without tickets get one now: that post then waits for
        its turn, which paces the environment, though only after it sampled."""
        environment = self._environment_name(ticket, groups[0])
        number = ticket
        if number is None:
            reply = await self._producer.ticket(version=await self.first_version(), environment=environment)
            if isinstance(reply, Finished):
                self.counts["finished"] += len(groups)
                return [{"status": "received", "put": "finished"}] * len(groups)
            number = reply.ticket
        queued = [
            Group(
                group_id=f"{number}:{i}",
                ticket=number,
                actor=self._actor,
                environment=environment,
                trajectories=trajectories,
            )
            for i, trajectories in enumerate(made)
            if trajectories
        ]
        try:
            for group in queued:
                group.validate()
            if not queued:
                scores = sum((Scores.of(list(group.scores)) for group in groups), Scores())
                await self._producer.void(number, "no_variance", scores)
            puts = {group.group_id: await self._put(group, final=group is queued[-1]) for group in queued}
        except (MessageError, QueueError) as error:
            if ticket is None:
                await self._producer.void(number, "invalid")
            raise Refusal("invalid", f"the group can't be queued: {error}") from None
        self.counts["no_variance"] += len(made) - len(queued)
        none = {"status": "received", "put": "no_variance"}
        return [puts.get(f"{number}:{i}", none) for i in range(len(made))]

    async def _put(self, group: Group, *, final: bool) -> dict[str, Any]:
        reply = await self._producer.put(group, final=final)
        self.counts[reply.status] += 1
        if reply.status == "invalid":
            raise QueueError(reply.reason)
        return {"status": "received", "group": group.group_id, "put": reply.status}

    def _environment_name(self, ticket: int | None, group: ScoredGroup) -> str:
        live = None if ticket is None else self._tickets.live(ticket)
        if live is not None:
            return live.environment
        if group.env_id is not None and 0 <= group.env_id < len(self._environments):
            return str(self._environments[group.env_id]["name"])
        return "unknown"
