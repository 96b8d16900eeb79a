"""An actor's HTTP routes without an actor: it answers sums, issues tickets, trains on nothing and counts everything."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from transformers import AutoTokenizer


class FakeActor:
    """Batches of `batch` scored groups make a step; the queue finishes after `steps`."""

    def __init__(self, model, *, name: str = "actor-0", steps: int = 3, batch: int = 4, live_at_most: int = 8) -> None:
        self.name = name
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.steps, self.batch, self.live_at_most = steps, batch, live_at_most
        self.version: int | None = 0
        self.log: list[tuple[str, Any]] = []
        """What happened, in order: evaluation, ticket, scored, release."""
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        """Inference requests: route, Lachesis's headers, body."""
        self.groups: list[dict[str, Any]] = []
        self.live: set[int] = set()
        self.most_live = 0
        self.released: dict[int, str] = {}
        self.items: dict[int, int] = {}
        """Number of the item of each ticket; those of tickets that came to nothing are given out again."""
        self.returned: list[int] = []
        self.fail_next = 0
        """Requests to answer with 500."""
        self.hold_training = False
        """Whether training requests are never answered."""
        self.url = ""
        self._next = 0
        self._next_item = 0
        self._polls_after_the_end = 0

    @property
    def step(self) -> int:
        return len(self.groups) // self.batch

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    @asynccontextmanager
    async def serve(self):
        app = web.Application(client_max_size=1 << 26, middlewares=[self._failing])
        app.add_routes(
            [
                web.post("/register-env", self._register),
                web.post("/scored_data", self._scored),
                web.post("/scored_data_list", self._scored),
                web.post("/generate", self._generate),
                web.post("/v1/chat/completions", self._chat),
                web.post("/lachesis/ticket", self._ticket),
                web.post("/lachesis/release", self._release),
                web.post("/lachesis/evaluation", self._evaluation),
                web.get("/lachesis/state", self._state),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @web.middleware
    async def _failing(self, request, handler):
        if self.fail_next:
            self.fail_next -= 1
            return web.json_response({"detail": "not now"}, status=500)
        return await handler(request)

    async def _register(self, request):
        body = await request.json()
        self.registered = body
        return web.json_response(
            {
                "status": "success",
                "env_id": 7,
                "wandb_name": f"{body['desired_name']}_0",
                "checkpoint_dir": "",
                "starting_step": 0,
                "checkpoint_interval": 0,
                "num_steps": self.steps,
            }
        )

    async def _ticket(self, request):
        assert set(await request.json()) == {"environment"}
        for _ in range(20):
            if self.finished:
                return web.json_response({"finished": True})
            if len(self.live) < self.live_at_most:
                self._next += 1
                self.live.add(self._next)
                self.most_live = max(self.most_live, len(self.live))
                self.log.append(("ticket", self._next))
                if self.returned:
                    item = self.returned.pop(0)
                else:
                    item, self._next_item = self._next_item, self._next_item + 1
                self.items[self._next] = item
                return web.json_response({"ticket": self._next, "version": self.version, "item": item})
            await asyncio.sleep(0.01)
        return web.json_response({"wait": "the others"})

    async def _release(self, request):
        body = await request.json()
        assert set(body) == {"ticket", "reason"}
        assert body["ticket"] not in self.released
        self.released[body["ticket"]] = body["reason"]
        if body["reason"] not in ("scored", "dropped_by_environment", "failed"):
            self.returned.append(self.items[body["ticket"]])
        self.live.discard(body["ticket"])
        self.log.append(("release", body["reason"]))
        return web.json_response({})

    async def _evaluation(self, request):
        self.log.append(("evaluation", await request.json()))
        return web.json_response({})

    async def _state(self, request):
        self._polls_after_the_end += self.finished
        return web.json_response(
            {
                "actor": self.name,
                "version": self.version,
                "step": self.step,
                "steps": self.steps,
                "finished": self.finished,
                "final": self.version if self.finished else None,
                "served_final": self._polls_after_the_end > 3,
            }
        )

    async def _scored(self, request):
        raw = await request.read()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        for group in data if isinstance(data, list) else [data]:
            ticket = group["group_overrides"]["lachesis_ticket"]
            if ticket not in self.live:
                return web.json_response({"detail": "ticket: not live"}, status=409)
            self.groups.append(group)
            self.log.append(("scored", ticket))
        if self.version is not None:
            self.version = self.step
        return web.json_response({"status": "received"})

    def _headers(self, request) -> dict[str, str]:
        return {k.title(): v for k, v in request.headers.items() if k.lower().startswith("x-lachesis")}

    def answer(self, prompt: str, i: int) -> str:
        """Right on every even answer."""
        a, b = map(int, re.search(r"(\d+) \+ (\d+)", prompt).groups())
        return f"{a} + {b} = {a + b + i % 2}"

    async def _generate(self, request):
        body = await request.json()
        self.requests.append(("generate", self._headers(request), body))
        if self.hold_training and request.headers.get("X-Lachesis-Split") == "train":
            await asyncio.Event().wait()
        prompt = self.tokenizer.decode(body["prompt"]["prompt_token_ids"])
        outputs = [
            [*self.tokenizer.encode(self.answer(prompt, i)), self.tokenizer.eos_token_id] for i in range(body["n"])
        ]
        cut = [len(output) > body["max_tokens"] for output in outputs]
        outputs = [output[: body["max_tokens"]] for output in outputs]
        return web.json_response(
            {
                "logprobs": [[[{str(t): -0.5}] for t in output] for output in outputs],
                "finish_reasons": ["length" if c else "stop" for c in cut],
            }
        )

    async def _chat(self, request):
        body = await request.json()
        self.requests.append(("chat", self._headers(request), body))
        prompt = body["messages"][-1]["content"]
        choices = [
            {
                "index": i,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": self.answer(prompt, i)},
            }
            for i in range(body.get("n", 1))
        ]
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}
        )
