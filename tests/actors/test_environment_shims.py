from __future__ import annotations

import asyncio
from contextvars import ContextVar

import aiohttp
import httpx
import openai
import pytest
from aiohttp import web
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lachesis_actors.environment_shims import lists_from_chat_templates, stamp_requests

LIBRARIES = (httpx, pytest.importorskip("httpx2"))


@pytest.fixture(autouse=True)
def _libraries_as_they_were(monkeypatch):
    monkeypatch.setattr(aiohttp.ClientSession, "_request", aiohttp.ClientSession._request)
    for library in LIBRARIES:
        monkeypatch.setattr(library.AsyncClient, "send", library.AsyncClient.send)
        monkeypatch.setattr(library.Client, "send", library.Client.send)
    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", PreTrainedTokenizerBase.apply_chat_template)


def test_chat_templates_give_lists_unless_asked_for_something_else(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chat = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    lists_from_chat_templates()
    lists_from_chat_templates()
    ids = tokenizer.apply_chat_template(chat)
    assert isinstance(ids, list)
    assert tokenizer.decode(ids) == "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False).endswith("5<|im_end|>\n")
    assert tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] == ids
    out = tokenize_for_trainer(tokenizer, chat)
    assert out["tokens"] == ids
    assert tokenizer.decode([m for m in out["masks"] if m != -100]) == "5<|im_end|>\n"


def test_requests_below_the_url_carry_the_headers_of_their_context():
    who: ContextVar[str] = ContextVar("who", default="nobody")
    seen: list[tuple[str, str | None, str | None]] = []

    async def answer(request):
        seen.append((request.path, request.headers.get("X-Who"), request.headers.get("X-Own")))
        message = {"role": "assistant", "content": "hi"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    async def serve():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def main():
        (mine, url), (other, elsewhere) = await serve(), await serve()
        stamp_requests(url, lambda: {"X-Who": who.get()})

        async def one(name: str):
            who.set(name)
            async with aiohttp.ClientSession() as session:
                await session.post(f"{url}/{name}/aiohttp", json={}, headers={"X-Own": "yes"})
                await session.get(f"{elsewhere}/{name}/elsewhere")
            async with aiohttp.ClientSession(base_url=url) as session:
                await session.get(f"/{name}/relative")
            for library in LIBRARIES:
                async with library.AsyncClient() as client:
                    await client.get(f"{url}/{name}/{library.__name__}")
                with library.Client() as client:
                    await asyncio.to_thread(client.get, f"{url}/{name}/{library.__name__}/blocking")
            client = openai.AsyncClient(api_key="x", base_url=f"{url}/{name}")
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

        await asyncio.gather(*(asyncio.create_task(one(name)) for name in ("clotho", "lachesis", "atropos")))
        await mine.cleanup()
        await other.cleanup()

    asyncio.run(main())
    assert len(seen) == 3 * 8
    for path, name, own in seen:
        assert name == (None if path.endswith("elsewhere") else path.split("/")[1])
        assert own == ("yes" if path.endswith("aiohttp") else None)
