"""The learner's side of the replay queue.

async with open_consumer("tcp://127.0.0.1:5710", name="learner", incarnation=uuid4().hex) as consumer:
    version = await consumer.reserve(None)
    await consumer.published(version)
    batch = await consumer.lease(version)
    await consumer.trained(version)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lachesis_transport.client import QueueClient, QueueState, Welcome, open_client
from lachesis_transport.keys import Keys
from lachesis_transport.messages import Batch, take
from lachesis_transport.sockets import plain_errors


class Consumer:
    """Versions, batches and reports of the learner; `open_consumer` makes it.

    Every method waits for the queue's answer and raises QueueError when it refuses, QueueRestarted when the queue came
    back without its state.
    """

    def __init__(self, client: QueueClient) -> None:
        self._client = client
        self.queue_id = client.queue_id
        """Names the state of the queue that said hello first: only there do this learner's versions mean anything."""

    @property
    def welcome(self) -> Welcome:
        """The run that this queue serves."""
        return self._client.welcome

    @property
    def state(self) -> QueueState:
        """Where the run stands; fresh to a second while the queue answers."""
        return self._client.state

    def report(self, kind: str, **fields: Any) -> None:
        """Add an event to the run's log."""
        self._client.report(kind, **fields)

    async def reserve(self, parent: int | None) -> int:
        """A version never used before, for weights trained from `parent` (None: the first weights of all).

        After a restart `parent` is the version of the checkpoint: groups trained beyond it are ready again.
        """
        reply = await self._request("reserve", f"a version with parent {parent}", parent=parent)
        return take(reply, "version", int)

    async def published(self, version: int) -> None:
        """`version` is the newest. Say so before any actor gets it: the queue refuses tokens of a newer one."""
        await self._request("published", f"version {version} to be noted as published", version=version)

    async def lease(self, version: int) -> Batch:
        """The batch to train `version` with, waiting until it is complete; the same one until it is trained."""
        reply = await self._request("lease", f"the batch that trains version {version}", version=version)
        return Batch.from_wire(take(reply, "batch", dict))

    async def trained(self, version: int) -> bool:
        """The batch leased for `version` has changed the weights. Returns whether the queue wants a checkpoint now,
        as it holds much that none covers."""
        reply = await self._request("trained", f"batch {version} to be noted as trained", version=version)
        return take(reply, "checkpoint_wanted", bool)

    async def commit(self, version: int, checkpoint: str) -> None:
        """A durable checkpoint holds the weights of `version`: the groups that made it may be forgotten."""
        await self._request(
            "commit", f"checkpoint {version} to be noted as durable", version=version, checkpoint=checkpoint
        )

    async def finish(self, version: int) -> None:
        """The run ends with `version`."""
        await self._request("finish", "the end of the run to be noted", version=version)

    async def _request(self, op: str, waits_for: str, **fields: Any) -> dict[str, Any]:
        return await self._client.request(op, waits_for=waits_for, queue_id=self.queue_id, **fields)


@asynccontextmanager
async def open_consumer(address: str, name: str, incarnation: str, keys: Keys | None = None) -> AsyncIterator[Consumer]:
    """The queue's client of the learner. Waits for the queue for ever, logging that it does; reconnects and repeats by
    itself. A new incarnation gets back what the one before had leased.

    Raises QueueError while another learner is live.
    """
    with plain_errors():
        async with open_client(address, role="learner", name=name, incarnation=incarnation, keys=keys) as client:
            yield Consumer(client)
