"""The actor's inference routes: OpenAI's shapes and Atropos's /generate, all on the engine's token-in/token-out route.

A request is held until the engine serves a published version; after that requests of a live ticket and evaluation
requests are never held (a second turn that waited for new tickets would deadlock). Requests with neither are served a
few at a time. What the engine sampled goes into the provenance before the answer goes out.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lachesis_actors.activity import Activity
from lachesis_actors.engine import Completion, Engine, EngineError, EngineRefused
from lachesis_actors.http_request import Refusal, read_json, while_connected
from lachesis_actors.inference_request import (
    Origin,
    RequestError,
    chat_answer,
    completion_answer,
    generate_answer,
    parse_max_tokens,
    parse_origin,
    parse_prompt,
    parse_sampling,
)
from lachesis_actors.provenance import Provenance, Record
from lachesis_actors.tickets import Tickets

logger = logging.getLogger("lachesis.gateway")

HOLD_SECONDS = 900.0
"""A request waits at most this long for the first published version."""

UNBOUND_REQUESTS = 32
"""Requests without a ticket that the engine works on at once; further ones wait."""

MAX_BODY = 16 << 20


class Gateway:
    """The inference routes of one actor."""

    def __init__(
        self,
        *,
        model: str,
        max_model_len: int,
        tickets: Tickets,
        provenance: Provenance,
        activity: Activity,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._tickets = tickets
        self._provenance = provenance
        self._activity = activity
        self._hold_seconds = hold_seconds
        self._opened = trio.Event()
        self._engine: Engine | None = None
        self._unbound = trio.CapacityLimiter(UNBOUND_REQUESTS)
        self.refused: Counter[str] = Counter()
        """Requests that were answered with an error, by reason."""

    def open(self, engine: Engine) -> None:
        """The engine serves a published version: let requests through."""
        self._engine = engine
        self._opened.set()

    def routes(self) -> list[Route]:
        """For a starlette application."""
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/generate", self._guarded(self._generate), methods=["POST"]),
        ]

    async def _health(self, request: Request) -> Response:
        if self._opened.is_set():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "waiting for the first published version"}, status_code=503)

    async def _models(self, request: Request) -> Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "lachesis",
            "max_model_len": self._max_model_len,
        }
        return JSONResponse({"object": "list", "data": [card]})

    def _guarded(
        self, serve: Callable[[Engine, Origin, dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                body = await read_json(request, max_bytes=MAX_BODY)
                if not isinstance(body, dict):
                    raise Refusal("invalid", f"body: {type(body).__name__}, expected an object")
                answer, _ = await while_connected(request, lambda: self._answer(serve, request, body))
            except Refusal as refusal:
                return self._error(refusal.status, str(refusal))
            return answer or self._error(499, "the client is gone")

        return endpoint

    async def _answer(
        self,
        serve: Callable[[Engine, Origin, dict[str, Any]], Awaitable[dict[str, Any]]],
        request: Request,
        body: dict[str, Any],
    ) -> Response:
        try:
            origin = parse_origin(request.headers)
            if origin.ticket is not None and not origin.evaluation and self._tickets.live(origin.ticket) is None:
                raise Refusal("ticket", f"X-Lachesis-Ticket: {origin.ticket} is not live on this actor", status=409)
            engine = await self._wait_for_engine()
            if origin.ticket is not None or origin.evaluation:
                return JSONResponse(await serve(engine, origin, body))
            async with self._unbound:
                return JSONResponse(await serve(engine, origin, body))
        except RequestError as error:
            return self._error(400, str(error))
        except EngineRefused as error:
            return self._error(400 if error.status < 500 else 502, error.text)
        except EngineError as error:
            return self._error(502, str(error))

    async def _wait_for_engine(self) -> Engine:
        with trio.move_on_after(self._hold_seconds):
            await self._opened.wait()
        if self._engine is None:
            raise Refusal("held", f"no policy version was published within {self._hold_seconds:g} s", status=503)
        return self._engine

    def _error(self, status: int, text: str) -> Response:
        self.refused[f"http_{status}"] += 1
        logger.warning("inference request refused with %d: %s", status, text)
        return JSONResponse({"error": {"message": text, "type": "lachesis", "code": status}}, status_code=status)

    async def _chat(self, engine: Engine, origin: Origin, body: dict[str, Any]) -> dict[str, Any]:
        own = ("messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        sampling = parse_sampling(body, own=own)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise RequestError(f"messages: {body.get('messages')!r}, expected a list of messages, not empty")
        prompt_ids = await engine.render_chat({name: body[name] for name in own if name in body})
        completions = await self._sample(engine, origin, prompt_ids, sampling, body, text=True)
        return chat_answer(
            completions,
            model=self._model,
            prompt_length=len(prompt_ids),
            logprobs=bool(body.get("logprobs")),
        )

    async def _completions(self, engine: Engine, origin: Origin, body: dict[str, Any]) -> dict[str, Any]:
        sampling = parse_sampling(body, own=("prompt",))
        prompt_ids = await self._prompt_ids(engine, body.get("prompt"))
        completions = await self._sample(engine, origin, prompt_ids, sampling, body, text=True)
        logprobs = body.get("logprobs") is not None and body["logprobs"] is not False
        return completion_answer(completions, model=self._model, prompt_length=len(prompt_ids), logprobs=logprobs)

    async def _generate(self, engine: Engine, origin: Origin, body: dict[str, Any]) -> dict[str, Any]:
        sampling = parse_sampling(body, own=("prompt",))
        prompt = body.get("prompt")
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids")
        prompt_ids = await self._prompt_ids(engine, prompt)
        completions = await self._sample(engine, origin, prompt_ids, sampling, body, text=True)
        return generate_answer(completions, prompt_ids=prompt_ids)

    async def _prompt_ids(self, engine: Engine, value: Any) -> list[int]:
        prompt = parse_prompt(value)
        return await engine.tokenize(prompt) if isinstance(prompt, str) else prompt

    async def _sample(
        self,
        engine: Engine,
        origin: Origin,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        body: dict[str, Any],
        *,
        text: bool,
    ) -> list[Completion]:
        max_tokens = parse_max_tokens(body, prompt_length=len(prompt_ids), max_model_len=self._max_model_len)
        sampled = 0
        self._activity.begin(now=time.time())
        try:
            completions = await engine.generate(prompt_ids, {**sampling, "max_tokens": max_tokens}, text=text)
            sampled = sum(len(c.token_ids) for c in completions)
        finally:
            self._activity.end(tokens=sampled, now=time.time())
        for i, completion in enumerate(completions):
            self._check(completion, i)
        if not origin.evaluation:
            self._remember(origin.ticket, prompt_ids, completions)
        return completions

    def _check(self, completion: Completion, index: int) -> None:
        if not completion.valid:
            at = int(np.flatnonzero(~(completion.logprobs > -9000))[0])
            self.refused["invalid_logprob"] += 1
            raise Refusal(
                "invalid_logprob",
                f"answer {index}: log-prob {completion.logprobs[at]} of output token {at} is missing or not a number",
                status=500,
            )
        if completion.finish_reason not in ("stop", "length"):
            raise Refusal(
                "aborted",
                f"answer {index}: ended with {completion.finish_reason!r}, expected stop or length",
                status=503,
            )

    def _remember(self, ticket: int | None, prompt_ids: list[int], completions: list[Completion]) -> None:
        # A ticket that ended while the engine worked has nobody left to post this.
        if ticket is not None and self._tickets.live(ticket) is None:
            return
        prompt = np.array(prompt_ids, dtype=np.int32)
        records = [
            Record(
                prompt_ids=prompt,
                output_ids=c.token_ids,
                logprobs=c.logprobs,
                versions=c.versions,
                finish_reason=c.finish_reason,
            )
            for c in completions
        ]
        self._provenance.add(ticket, records, now=time.monotonic())
