"""The routes of Lachesis's environment runner: tickets, evaluations, the state of the run (docs/protocols.md)."""

from __future__ import annotations

import math
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lachesis_actors.http_request import Refusal, take_field, take_name, while_connected
from lachesis_actors.provenance import Provenance
from lachesis_actors.tickets import Tickets
from lachesis_actors.trajectory_api import TrajectoryApi
from lachesis_transport.messages import Scores
from lachesis_transport.producer import Finished, Producer

TICKET_SECONDS = 30.0
"""A ticket request is answered within this, with {wait} if none was granted."""

DROPPED = "dropped_by_environment"
"""Reason of a release that uses up the ticket's item."""

MAX_METRICS = 256
MAX_REASON = 200


class RunnerRoutes:
    """The routes below /lachesis of one actor."""

    def __init__(
        self,
        *,
        actor: str,
        api: TrajectoryApi,
        producer: Producer,
        tickets: Tickets,
        provenance: Provenance,
        ticket_seconds: float = TICKET_SECONDS,
    ) -> None:
        self._actor = actor
        self._api = api
        self._producer = producer
        self._tickets = tickets
        self._provenance = provenance
        self._ticket_seconds = ticket_seconds

    def routes(self) -> list[Route]:
        """For a starlette application."""
        return [
            Route("/lachesis/ticket", self._api.guarded(self._ticket), methods=["POST"]),
            Route("/lachesis/release", self._api.guarded(self._release), methods=["POST"]),
            Route("/lachesis/evaluation", self._api.guarded(self._evaluation), methods=["POST"]),
            Route("/lachesis/state", self._state, methods=["GET"]),
        ]

    async def _ticket(self, request: Request, body: Any) -> dict[str, Any]:
        environment = take_name(body, "environment")
        granted: list[int] = []

        async def ask() -> dict[str, Any]:
            with trio.move_on_after(self._ticket_seconds):
                version = await self._api.first_version()
                reply = await self._producer.ticket(version=version, environment=environment)
                if isinstance(reply, Finished):
                    return {"finished": True}
                granted.append(reply.ticket)
                self._tickets.open(reply.ticket, environment=environment, version=reply.version)
                return {"ticket": reply.ticket, "version": reply.version, "item": reply.item}
            if self._api.version is None:
                return {"wait": "the first published version"}
            return {"wait": "a ticket: as many groups are on their way as the staleness bound allows"}

        answer, gone = await while_connected(request, ask)
        if gone and granted:
            self._tickets.end(granted[0])
            await self._producer.void(granted[0], "client_gone")
        return answer or {"wait": "the client is gone"}

    async def _release(self, request: Request, body: Any) -> dict[str, Any]:
        ticket = take_field(body, "ticket", int)
        reason = take_field(body, "reason", str)[:MAX_REASON]
        live = self._tickets.end(ticket)
        if live is not None:
            self._provenance.close(ticket)
            # The queue gives the item of a ticket that ends without scores to another one. What the environment itself
            # dropped (Atropos's own do that with groups of equal scores) is used: it ends with the scores of no group.
            dropped = live.refusal is None and reason == DROPPED
            await self._producer.void(ticket, live.refusal or reason or "released", Scores() if dropped else None)
        return {}

    async def _evaluation(self, request: Request, body: Any) -> dict[str, Any]:
        environment = take_name(body, "environment")
        metrics = take_field(body, "metrics", dict)
        version = body.get("version")
        if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
            raise Refusal("invalid", f"version: {version!r:.80}, expected an integer of 0 or more, or null")
        if len(metrics) > MAX_METRICS:
            raise Refusal("invalid", f"metrics: {len(metrics)} of them, expected at most {MAX_METRICS}")
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise Refusal("invalid", f"metrics.{name}: {value!r:.80}, expected a finite number")
        self._producer.report(
            "evaluation",
            environment=environment,
            version=self._api.version if version is None else version,
            metrics={str(name): float(value) for name, value in metrics.items()},
        )
        return {}

    async def _state(self, request: Request) -> Response:
        state = self._producer.state
        return JSONResponse(
            {
                "actor": self._actor,
                "version": self._api.version,
                "step": state.step,
                "steps": self._producer.welcome.steps,
                "finished": state.finished,
                "final": state.final,
                "served_final": state.final is not None and self._api.version == state.final,
            }
        )
