"""The environment process's side of the actor's HTTP routes: it waits for an actor that is away, for a while."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np

logger = logging.getLogger("lachesis.environment")

AWAY_SECONDS = 120.0
"""How long the actor may be unreachable."""
ANSWER_SECONDS = 60.0
"""Deadline of one answer; tickets are held for less by the actor."""
SCORED_SECONDS = 600.0
"""Deadline of one answer to a scored group, which the actor holds while the queue is away or full."""
LONGEST_PAUSE = 2.0
COMPRESS_BYTES = 16384


class ActorGone(Exception):
    """The actor could not be reached for too long."""


class ActorRefused(Exception):
    """The actor answered that a request is wrong. The text is its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to start one group."""

    ticket: int
    item: int
    """Number of the item to be trained, from 0: the queue counts for all actors that run this environment."""


class ActorRoutes:
    """The routes of the actor at `url`. Every request may be sent twice: the actor knows the second."""

    def __init__(self, url: str, *, away_seconds: float = AWAY_SECONDS) -> None:
        self._url = url
        self._away_seconds = away_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ActorRoutes:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def state(self) -> dict[str, Any]:
        """{actor, version, step, steps, finished, final, served_final}."""
        return await self._request("GET", "/lachesis/state")

    async def ticket(self, environment: str) -> Ticket | None:
        """Wait for a ticket; None when the queue has finished."""
        while True:
            answer = await self._request("POST", "/lachesis/ticket", {"environment": environment})
            if answer.get("finished"):
                return None
            if "ticket" in answer:
                return Ticket(ticket=int(answer["ticket"]), item=int(answer["item"]))

    async def release(self, ticket: int, reason: str) -> None:
        """The group of this ticket has ended; without a scored group the ticket is voided for this reason."""
        await self._request("POST", "/lachesis/release", {"ticket": ticket, "reason": reason})

    async def evaluation(self, environment: str, metrics: dict[str, float], version: int | None) -> None:
        """Report an evaluation."""
        body = {"environment": environment, "metrics": metrics, "version": version}
        await self._request("POST", "/lachesis/evaluation", body)

    async def scored(self, data: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Post one scored group, or several of one ticket."""
        route = "/scored_data_list" if isinstance(data, list) else "/scored_data"
        await self._request("POST", route, data, seconds=SCORED_SECONDS)

    async def _request(self, method: str, route: str, body: Any = None, *, seconds: float = ANSWER_SECONDS) -> Any:
        """One request, sent again while the actor is away. Raises ActorGone and, for an answer 4xx, ActorRefused."""
        data, headers = _encoded(body)
        since: float | None = None
        pause = 0.1
        while True:
            assert self._session is not None
            try:
                timeout = aiohttp.ClientTimeout(total=seconds)
                async with self._session.request(
                    method, self._url + route, data=data, headers=headers, timeout=timeout
                ) as response:
                    text = await response.text()
                    if response.status < 400:
                        return json.loads(text)
                    if response.status < 500:
                        raise ActorRefused(f"{method} {route}: {response.status} {text[:500]}")
                    problem = f"{response.status} {text[:200]}"
            except TimeoutError:
                # It holds the request, so it is there.
                logger.info("%s %s: no answer within %g s, sending it again", method, route, seconds)
                since = None
                continue
            except (aiohttp.ClientError, OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            if since is None:
                since = now
                logger.info("waiting for the actor at %s (%s)", self._url, problem)
            if now - since > self._away_seconds:
                raise ActorGone(f"the actor at {self._url} was away for {self._away_seconds:g} s ({problem})")
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)


def _encoded(body: Any) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, {}
    data = json.dumps(body, default=_plain).encode()
    headers = {"Content-Type": "application/json"}
    if len(data) < COMPRESS_BYTES:
        return data, headers
    packer = zlib.compressobj(1, wbits=31)
    return packer.compress(data) + packer.flush(), {**headers, "Content-Encoding": "gzip"}


def _plain(value: Any) -> Any:
    """Environments put numpy scalars and arrays into their groups."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a scored group, expected numbers, text, lists and maps")
