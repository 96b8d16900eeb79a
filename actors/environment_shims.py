"""What this process changes in libraries, for stock environments to work as they were written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
from transformers import PreTrainedTokenizerBase


def lists_from_chat_templates() -> None:
    """Let tokenizers answer apply_chat_template with a list of ids again, unless asked for something else.

    Since transformers 5 the default is a mapping, from which Atropos's tokenize_for_trainer makes broken tokens and
    masks.
    """
    original = PreTrainedTokenizerBase.apply_chat_template
    if getattr(original, "gives_lists", False):
        return

    @functools.wraps(original)
    def apply_chat_template(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("return_dict", False)
        return original(self, *args, **kwargs)

    apply_chat_template.gives_lists = True  # type: ignore[attr-defined]
    PreTrainedTokenizerBase.apply_chat_template = apply_chat_template


def stamp_requests(url: str, headers: Callable[[], dict[str, str]]) -> None:
    """Add `headers()`, called in the context of the request, to everything that aiohttp and httpx send below `url`.

    These two are what Atropos's servers and the OpenAI client use; requests to anywhere else stay as they are.
    """
    mine = url.rstrip("/") + "/"
    aiohttp_request = aiohttp.ClientSession._request

    @functools.wraps(aiohttp_request)
    async def request(self: aiohttp.ClientSession, method: str, str_or_url: Any, **kwargs: Any) -> Any:
        if str(self._build_url(str_or_url)).startswith(mine):
            kwargs["headers"] = {**dict(kwargs.get("headers") or {}), **headers()}
        return await aiohttp_request(self, method, str_or_url, **kwargs)

    aiohttp.ClientSession._request = request  # type: ignore[method-assign]
    asynchronous, blocking = httpx.AsyncClient.send, httpx.Client.send

    @functools.wraps(asynchronous)
    async def send(self: httpx.AsyncClient, request: httpx.Request, **kwargs: Any) -> httpx.Response:
        if str(request.url).startswith(mine):
            request.headers.update(headers())
        return await asynchronous(self, request, **kwargs)

    @functools.wraps(blocking)
    def send_blocking(self: httpx.Client, request: httpx.Request, **kwargs: Any) -> httpx.Response:
        if str(request.url).startswith(mine):
            request.headers.update(headers())
        return blocking(self, request, **kwargs)

    httpx.AsyncClient.send = send  # type: ignore[method-assign]
    httpx.Client.send = send_blocking  # type: ignore[method-assign]
