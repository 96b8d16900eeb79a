"""What this process changes in libraries, for stock environments to work as they were written."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import aiohttp
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
    """Add `headers()`, called in the context of the request, to all that aiohttp, httpx and httpx2 send below `url`.

    These are what Atropos's servers and the OpenAI client use; requests to anywhere else stay as they are.
    """
    mine = url.rstrip("/") + "/"
    aiohttp_request = aiohttp.ClientSession._request

    @functools.wraps(aiohttp_request)
    async def request(self: aiohttp.ClientSession, method: str, str_or_url: Any, **kwargs: Any) -> Any:
        if str(self._build_url(str_or_url)).startswith(mine):
            kwargs["headers"] = {**dict(kwargs.get("headers") or {}), **headers()}
        return await aiohttp_request(self, method, str_or_url, **kwargs)

    aiohttp.ClientSession._request = request  # type: ignore[method-assign]
    # The OpenAI client speaks through httpx2 or httpx, depending on its version.
    for name in ("httpx", "httpx2"):
        if importlib.util.find_spec(name) is not None:
            _stamp_httpx(importlib.import_module(name), mine, headers)


def _stamp_httpx(library: Any, mine: str, headers: Callable[[], dict[str, str]]) -> None:
    asynchronous, blocking = library.AsyncClient.send, library.Client.send

    @functools.wraps(asynchronous)
    async def send(self: Any, request: Any, **kwargs: Any) -> Any:
        if str(request.url).startswith(mine):
            request.headers.update(headers())
        return await asynchronous(self, request, **kwargs)

    @functools.wraps(blocking)
    def send_blocking(self: Any, request: Any, **kwargs: Any) -> Any:
        if str(request.url).startswith(mine):
            request.headers.update(headers())
        return blocking(self, request, **kwargs)

    library.AsyncClient.send = send
    library.Client.send = send_blocking
