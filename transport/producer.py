"""The actor's side of the replay queue.

async with open_producer("tcp://127.0.0.1:5710", actor="actor-0", incarnation=uuid4().hex) as producer:
    producer.serving(0)
    ticket = await producer.ticket(version=0, environment="arithmetic")
    reply = await producer.put(group)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from lachesis_transport.client import QueueClient, QueueRestarted, QueueState, Waiting, Welcome, open_client
from lachesis_transport.decisions import Finished as Finished
from lachesis_transport.keys import Keys
from lachesis_transport.messages import Group, Scores, take
from lachesis_transport.sockets import plain_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to start one group."""

    ticket: int
    deadline: int
    """Depth in the lineage of the last version that it may train; without rollbacks that is the version itself."""
    version: int
    """The version that it was issued at."""
    item: int
    """Number of the prompt to train, from 0, in its environment's endless stream."""


@dataclass(frozen=True, slots=True)
class PutReply:
    """What became of a group."""

    status: str
    """accepted, duplicate, stale or invalid."""
    reason: str = ""


class Producer:
    """Tickets, groups and reports of one actor; `open_producer` makes it."""

    def __init__(self, client: QueueClient, nursery: trio.Nursery) -> None:
        self._client = client
        self._nursery = nursery
        self._issued_by: dict[int, str] = {}

    @property
    def welcome(self) -> Welcome:
        """The run that this queue serves."""
        return self._client.welcome

    @property
    def state(self) -> QueueState:
        """Where the run stands; fresh to a second while the queue answers."""
        return self._client.state

    def serving(self, version: int) -> None:
        """The actor serves `version` from now on: heartbeats say so, and tickets are issued at it."""
        self._client.serve(version)

    def report(self, kind: str, **fields: Any) -> None:
        """Add an event to the run's log."""
        self._client.report(kind, **fields)

    async def ticket(self, *, version: int, environment: str) -> Ticket | Finished:
        """The right to start one group, waiting until pacing allows it; Finished once the run has finished.

        While it waits it asks at the version that `serving` named last, if that is newer: a ticket at an old version
        may never come. When it is cancelled, a ticket that was issued all the same is voided.
        Raises QueueError for a version that the queue does not know.
        """
        ask = self._client.number()
        try:
            return await self._ask(ask, version, environment)
        except trio.Cancelled:
            self._nursery.start_soon(self._cancel, ask)
            raise

    async def _ask(self, ask: int, version: int, environment: str) -> Ticket | Finished:
        reply = await self._client.request(
            "ticket",
            waits_for=f"a ticket for {environment}",
            number=ask,
            fresh=lambda: {"version": max(version, self._client.version or 0)},
            environment=environment,
        )
        if reply.get("finished"):
            return Finished()
        ticket = Ticket(
            ticket=take(reply, "ticket", int),
            deadline=take(reply, "deadline", int),
            version=take(reply, "version", int),
            item=take(reply, "item", int),
        )
        self._issued_by[ticket.ticket] = self._client.queue_id
        return ticket

    async def _cancel(self, ask: int) -> None:
        await self._client.request("void", waits_for="an answer", ticket=None, ask=ask, reason="cancelled", scores=None)

    async def void(self, ticket: int, reason: str, scores: Scores | None = None) -> None:
        """No (further) group will come for this ticket; `scores` of one that ended without being put.

        Raises QueueError for a ticket of another actor or one that never was.
        """
        try:
            await self._client.request(
                "void",
                waits_for=f"the end of ticket {ticket}",
                queue_id=self._issued_by.get(ticket),
                ticket=ticket,
                reason=reason,
                scores=scores.to_wire() if scores else None,
            )
        except QueueRestarted:
            pass  # the queue that issued it is gone, and the ticket with it
        self._issued_by.pop(ticket, None)

    async def put(self, group: Group, final: bool = True) -> PutReply:
        """Hand a group over, waiting while the queue is full or away. `final`: the last group of its ticket.

        After `accepted` or `duplicate` the queue has it. `stale`: too old, or its ticket has ended. `invalid`: refused
        for good, the reason names the field. Cancelling leaves open whether the queue has it; putting it again is safe.
        """
        packed = group.pack()
        issued_by = self._issued_by.get(group.ticket) if group.ticket is not None else None
        waiting = Waiting(f"{self._client.name}: waiting for room for group {group.group_id}", self._client.address)
        while True:
            try:
                reply = await self._client.request(
                    "put", waits_for=f"room for group {group.group_id}", queue_id=issued_by, group=packed, final=final
                )
            except QueueRestarted as error:
                return PutReply("stale", str(error))
            answer = PutReply(take(reply, "status", str), take(reply, "reason", str))
            if answer.status != "full":
                break
            waiting.note(f"the queue is full: {answer.reason}")
            await trio.sleep(take(reply, "retry_after", float))
        if final and group.ticket is not None and answer.status != "invalid":
            self._issued_by.pop(group.ticket, None)
        return answer


@asynccontextmanager
async def open_producer(
    address: str, actor: str, incarnation: str, keys: Keys | None = None
) -> AsyncIterator[Producer]:
    """The queue's client of one actor. Waits for the queue for ever, logging that it does; reconnects and repeats by
    itself. On exit it says goodbye: the actor's open tickets are voided.

    Raises QueueError when the queue refuses: another live actor keeps the name, say.
    """
    with plain_errors():
        async with open_client(address, role="actor", name=actor, incarnation=incarnation, keys=keys) as client:
            async with trio.open_nursery() as nursery:
                try:
                    yield Producer(client, nursery)
                finally:
                    nursery.cancel_scope.cancel()
