"""Requests of OpenAI clients and of Atropos's vLLM client, translated to vLLM's sampling parameters and back. Pure."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lachesis_actors.engine import Completion
from lachesis_actors.http_request import MAX_DIGITS

TICKET_HEADER = "x-lachesis-ticket"
SPLIT_HEADER = "x-lachesis-split"

SAMPLING = {
    "n": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "ignore_eos": bool,
    "min_tokens": int,
    "stop_token_ids": list,
    "skip_special_tokens": bool,
    "spaces_between_special_tokens": bool,
    "include_stop_str_in_output": bool,
}
"""Fields that go to vLLM as they are, with their types."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
}
"""Fields that are accepted with a value that changes nothing (null besides these), and refused with any other."""

IGNORED = ("model", "user", "metadata", "store", "return_token_ids", "detokenize")


class RequestError(ValueError):
    """A request can't be served as it is. The text names the field, the value and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """On whose behalf a request comes, by its headers."""

    ticket: int | None
    evaluation: bool


def parse_origin(headers: Mapping[str, str]) -> Origin:
    """Read X-Lachesis-Ticket and X-Lachesis-Split. Raises RequestError."""
    split = headers.get(SPLIT_HEADER, "train")
    if split not in ("train", "eval"):
        raise RequestError(f"X-Lachesis-Split: {split!r}, expected train or eval")
    text = headers.get(TICKET_HEADER)
    if text is None:
        return Origin(ticket=None, evaluation=split == "eval")
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
        raise RequestError(f"X-Lachesis-Ticket: {text!r:.80}, expected an integer of 0 or more")
    return Origin(ticket=int(text), evaluation=split == "eval")


def parse_sampling(body: Mapping[str, Any], *, own: Sequence[str]) -> dict[str, Any]:
    """vLLM's sampling parameters of a request, without max_tokens.

    `own` names the fields that the route reads itself. Raises RequestError for a field of the wrong type, for one that
    isn't offered and for one that would sample from another distribution than the recorded log-probs say.
    """
    sampling: dict[str, Any] = {}
    for name, value in body.items():
        if name in own or name in IGNORED or value is None or name in ("max_tokens", "max_completion_tokens"):
            continue
        if name == "stop":
            sampling[name] = _stop(value)
        elif name in SAMPLING:
            sampling[name] = _typed(name, value, SAMPLING[name])
        elif name == "logprobs":
            if not isinstance(value, (bool, int)) or not 0 <= value <= 1:
                raise RequestError(f"logprobs: {value!r}, expected true, false, 0 or 1 (the sampled token's)")
        elif name in NEUTRAL:
            if not any(value == neutral for neutral in NEUTRAL[name]):
                raise RequestError(f"{name}: {value!r} is not offered, expected none")
        else:
            raise RequestError(f"{name}: unknown field, expected one of OpenAI's or of vLLM's sampling parameters")
    if sampling.get("n", 1) < 1:
        raise RequestError(f"n: {sampling['n']}, expected 1 or more")
    return sampling


def parse_max_tokens(body: Mapping[str, Any], *, prompt_length: int, max_model_len: int) -> int:
    """Output tokens that a request may sample: what it asks for (max_completion_tokens, max_tokens) and what the
    context leaves. Raises RequestError when the prompt leaves nothing."""
    room = max_model_len - prompt_length
    if room < 1:
        raise RequestError(f"prompt: {prompt_length} tokens, expected fewer than {max_model_len} (max_model_len)")
    asked = body.get("max_completion_tokens")
    if asked is None:
        asked = body.get("max_tokens")
    if asked is None:
        return room
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise RequestError(f"max_tokens: {asked!r}, expected an integer of 1 or more")
    return min(asked, room)


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(f"{name}: {value!r}, expected {kind.__name__}")
    return value


def _stop(value: Any) -> list[str]:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(item, str) and item for item in stop):
        raise RequestError(f"stop: {value!r}, expected a string or a list of strings, none of them empty")
    return stop


def parse_prompt(value: Any) -> str | list[int]:
    """The one prompt of a completions request, as text or as token ids. Raises RequestError."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return value
    text = repr(value)
    raise RequestError(f"prompt: {text[:80]}, expected one text or one list of token ids, not empty")


def chat_answer(completions: Sequence[Completion], *, model: str, prompt_length: int, logprobs: bool) -> dict[str, Any]:
    """The body of /v1/chat/completions."""
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": c.text},
            "finish_reason": c.finish_reason,
            "logprobs": {"content": _chat_logprobs(c)} if logprobs else None,
        }
        for i, c in enumerate(completions)
    ]
    return _answer("chat.completion", "chatcmpl", choices, completions, model=model, prompt_length=prompt_length)


def completion_answer(
    completions: Sequence[Completion], *, model: str, prompt_length: int, logprobs: bool
) -> dict[str, Any]:
    """The body of /v1/completions."""
    choices = [
        {
            "index": i,
            "text": c.text,
            "finish_reason": c.finish_reason,
            "logprobs": _completion_logprobs(c) if logprobs else None,
        }
        for i, c in enumerate(completions)
    ]
    return _answer("text_completion", "cmpl", choices, completions, model=model, prompt_length=prompt_length)


def generate_answer(completions: Sequence[Completion], *, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """The body of /generate, as Atropos's vLLM client reads it: for each answer one {"token id": log-prob} a token."""
    return {
        "text": [c.text for c in completions],
        "prompt_token_ids": list(prompt_ids),
        "token_ids": [c.token_ids.tolist() for c in completions],
        "versions": [c.versions.tolist() for c in completions],
        "logprobs": [
            [[{str(token): logprob}] for token, logprob in zip(c.token_ids.tolist(), c.logprobs.tolist(), strict=True)]
            for c in completions
        ],
        "finish_reasons": [c.finish_reason for c in completions],
    }


def _chat_logprobs(completion: Completion) -> list[dict[str, Any]]:
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode("utf-8", "replace")), "top_logprobs": []}
        for piece, logprob in zip(completion.pieces, completion.logprobs.tolist(), strict=True)
    ]


def _completion_logprobs(completion: Completion) -> dict[str, Any]:
    offsets, at = [], 0
    for piece in completion.pieces:
        offsets.append(at)
        at += len(piece)
    return {
        "tokens": list(completion.pieces),
        "token_logprobs": completion.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _answer(
    kind: str,
    prefix: str,
    choices: list[dict[str, Any]],
    completions: Sequence[Completion],
    *,
    model: str,
    prompt_length: int,
) -> dict[str, Any]:
    sampled = sum(len(c.token_ids) for c in completions)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_length,
            "completion_tokens": sampled,
            "total_tokens": prompt_length + sampled,
        },
    }
