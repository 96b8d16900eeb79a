from __future__ import annotations

import gzip
import json
import re

import httpx
import numpy as np
import pytest
import trio
import trio.testing
from starlette.applications import Starlette

from lachesis_actors.activity import Activity
from lachesis_actors.engine import Completion, EngineError, EngineRefused
from lachesis_actors.gateway import UNBOUND_REQUESTS, Gateway
from lachesis_actors.inference_request import RequestError, parse_max_tokens, parse_sampling
from lachesis_actors.provenance import Provenance
from lachesis_actors.tickets import Tickets


def completion(
    *ids: int, logprob: float = -0.5, version: int = 3, finish: str = "stop", text: str = "ab"
) -> Completion:
    n = len(ids)
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=np.full(n, logprob, np.float32),
        versions=np.full(n, version, np.int32),
        finish_reason=finish,
        text=text,
        pieces=tuple("ab"[:n].ljust(n, "c")),
    )


class FakeEngine:
    """Answers what it is told to; records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], dict]] = []
        self.answer: list[Completion] | Exception = [completion(8, 2)]
        self.gate: trio.Event | None = None
        self.running = 0
        self.peak = 0
        self.cancelled = 0

    async def render_chat(self, request: dict) -> list[int]:
        return [1, *(len(m["content"]) for m in request["messages"]), 5]

    async def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    async def generate(self, prompt_ids, sampling, *, text=False):
        self.asked.append((list(prompt_ids), dict(sampling)))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer
        except trio.Cancelled:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class Bench:
    """A gateway over a fake engine, reached through ASGI."""

    def __init__(self, *, opened: bool = True, hold_seconds: float = 60.0) -> None:
        self.engine = FakeEngine()
        self.tickets = Tickets()
        self.provenance = Provenance()
        self.activity = Activity(now=0.0)
        self.gateway = Gateway(
            model="tiny",
            max_model_len=32,
            tickets=self.tickets,
            provenance=self.provenance,
            activity=self.activity,
            hold_seconds=hold_seconds,
        )
        if opened:
            self.gateway.open(self.engine)
        app = Starlette(routes=self.gateway.routes())
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://actor", timeout=None, trust_env=False
        )

    async def chat(self, *, ticket: int | None = None, split: str | None = None, **body) -> httpx.Response:
        headers = {}
        if ticket is not None:
            headers["X-Lachesis-Ticket"] = str(ticket)
        if split is not None:
            headers["X-Lachesis-Split"] = split
        body = {"messages": [{"role": "user", "content": "hey"}], **body}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.trio
async def test_chat_completion_in_openais_shape(bench):
    bench.tickets.open(7, environment="e", version=3)
    bench.engine.answer = [completion(8, 2), completion(9, 4, finish="length", text="x")]
    response = await bench.chat(ticket=7, n=2, max_tokens=10, temperature=0.7, seed=4, stop="!", logprobs=True)
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert [c["message"]["content"] for c in body["choices"]] == ["ab", "x"]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length"]
    assert body["choices"][0]["logprobs"]["content"][0] == {
        "token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [],
    }  # fmt: skip
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    prompt, sampling = bench.engine.asked[0]
    assert prompt == [1, 3, 5]
    assert sampling == {"n": 2, "max_tokens": 10, "temperature": 0.7, "seed": 4, "stop": ["!"]}


@pytest.mark.trio
async def test_what_the_engine_sampled_is_on_record_before_the_answer(bench):
    bench.tickets.open(7, environment="e", version=3)
    await bench.chat(ticket=7)
    tokens, mask = np.array([1, 3, 5, 8, 2], np.int32), np.array([0, 0, 0, 1, 1], np.uint8)
    (matched,) = bench.provenance.match(7, [tokens], [mask])
    assert matched.logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert matched.versions.tolist() == [-1, -1, -1, 3, 3]


@pytest.mark.trio
async def test_evaluation_leaves_no_record(bench):
    assert (await bench.chat(split="eval")).status_code == 200
    bench.tickets.open(7, environment="e", version=3)
    assert (await bench.chat(split="eval", ticket=7)).status_code == 200
    assert bench.provenance.statistics().records == 0


@pytest.mark.trio
async def test_requests_without_a_ticket_are_on_record_under_none(bench):
    await bench.chat()
    tokens, mask = np.array([1, 3, 5, 8, 2], np.int32), np.array([0, 0, 0, 1, 1], np.uint8)
    assert len(bench.provenance.match(None, [tokens], [mask])) == 1


@pytest.mark.trio
async def test_completions_take_text_and_ids(bench):
    response = await bench.client.post("/v1/completions", json={"prompt": "hi", "logprobs": 1, "max_tokens": 4})
    assert response.json()["object"] == "text_completion"
    assert response.json()["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"], "token_logprobs": [-0.5, -0.5], "top_logprobs": None, "text_offset": [0, 1],
    }  # fmt: skip
    await bench.client.post("/v1/completions", json={"prompt": [4, 5]})
    await bench.client.post("/v1/completions", json={"prompt": [[4, 6]]})
    assert [p for p, _ in bench.engine.asked] == [[104, 105], [4, 5], [4, 6]]
    assert [s["max_tokens"] for _, s in bench.engine.asked] == [4, 30, 30]


@pytest.mark.trio
async def test_generate_as_atroposs_vllm_client_reads_it(bench):
    body = {"prompt": {"prompt_token_ids": [4, 5, 6]}, "logprobs": 0, "n": 1, "max_tokens": 3, "temperature": 1}
    response = await bench.client.post("/generate", json=body)
    answer = response.json()
    assert answer["logprobs"] == [[[{"8": -0.5}], [{"2": -0.5}]]]
    assert answer["finish_reasons"] == ["stop"]
    assert answer["versions"] == [[3, 3]]
    assert answer["token_ids"] == [[8, 2]]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"stream": True}, "stream: True is not offered"),
        ({"tools": [{"type": "function"}]}, "tools: .* is not offered"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: 0.5 is not offered"),
        ({"top_logprobs": 5}, "top_logprobs: 5 is not offered"),
        ({"temprature": 1.0}, "temprature: unknown field"),
        ({"temperature": "hot"}, "temperature: 'hot', expected float"),
        ({"n": 0}, "n: 0, expected 1 or more"),
        ({"n": True}, "n: True, expected int"),
        ({"max_tokens": 0}, "max_tokens: 0, expected an integer of 1 or more"),
        ({"stop": [""]}, "stop: .*, expected a string"),
        ({"messages": []}, "messages: .*, expected a list of messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 40}, "prompt: 42 tokens, expected fewer than 32"),
    ],
)
@pytest.mark.trio
async def test_what_is_not_offered_is_refused_clearly(bench, body, text):
    response = await bench.chat(**body)
    assert response.status_code == 400
    assert re.search(text, response.json()["error"]["message"])
    assert bench.engine.asked == []


@pytest.mark.trio
async def test_neutral_values_are_fine(bench):
    neutral = {
        "stream": False, "tools": None, "frequency_penalty": 0, "presence_penalty": 0.0, "top_logprobs": None,
        "model": "whatever", "user": "me", "response_format": {"type": "text"},
    }  # fmt: skip
    assert (await bench.chat(**neutral)).status_code == 200
    assert bench.engine.asked[0][1] == {"max_tokens": 29}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Lachesis-Ticket": "x"}, 400),
        ({"X-Lachesis-Ticket": "-1"}, 400),
        ({"X-Lachesis-Split": "test"}, 400),
        ({"X-Lachesis-Ticket": "7"}, 409),
    ],
)
@pytest.mark.trio
async def test_headers_are_checked(bench, headers, status):
    body = {"prompt": "hi"}
    response = await bench.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == status
    assert "X-Lachesis" in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt":' + b"[" * 100_000])
@pytest.mark.trio
async def test_garbage_is_answered_400(bench, content):
    assert (await bench.client.post("/v1/completions", content=content)).status_code == 400


@pytest.mark.trio
async def test_zipped_bodies(bench):
    headers = {"Content-Encoding": "gzip"}
    good = gzip.compress(json.dumps({"prompt": "hi"}).encode())
    assert (await bench.client.post("/v1/completions", content=good, headers=headers)).status_code == 200
    bomb = gzip.compress(b" " * (17 << 20))
    assert (await bench.client.post("/v1/completions", content=bomb, headers=headers)).status_code == 413
    assert (await bench.client.post("/v1/completions", content=b"no", headers=headers)).status_code == 400


@pytest.mark.parametrize("logprob", [-9999.0, -9000.0, float("nan"), float("-inf")])
@pytest.mark.trio
async def test_a_missing_logprob_invalidates_the_answer(bench, logprob):
    bench.tickets.open(7, environment="e", version=3)
    bench.engine.answer = [completion(8, 2, logprob=logprob)]
    response = await bench.chat(ticket=7)
    assert response.status_code == 500
    assert "log-prob" in response.json()["error"]["message"]
    assert bench.gateway.refused["invalid_logprob"] == 1
    assert bench.provenance.statistics().records == 0


@pytest.mark.trio
async def test_the_engines_refusals_and_faults(bench):
    bench.engine.answer = EngineRefused("/r", 400, "n is too large")
    response = await bench.chat()
    assert (response.status_code, response.json()["error"]["message"]) == (400, "n is too large")
    bench.engine.answer = EngineError("no answer")
    assert (await bench.chat()).status_code == 502
    bench.engine.answer = [completion(8, finish="abort")]
    assert (await bench.chat()).status_code == 503
    assert bench.activity.requests == 0


@pytest.mark.trio
async def test_requests_wait_for_the_first_version(autojump_clock):
    bench = Bench(opened=False, hold_seconds=60)
    assert (await bench.client.get("/health")).status_code == 503
    statuses = []

    async def ask():
        statuses.append((await bench.chat(split="eval")).status_code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(30)
        assert statuses == []
        bench.gateway.open(bench.engine)
    assert statuses == [200]
    assert (await bench.client.get("/health")).status_code == 200


@pytest.mark.trio
async def test_the_wait_has_a_deadline(autojump_clock):
    bench = Bench(opened=False, hold_seconds=60)
    response = await bench.chat(split="eval")
    assert response.status_code == 503
    assert "60 s" in response.json()["error"]["message"]
    assert trio.current_time() >= 60


@pytest.mark.trio
async def test_only_requests_without_a_ticket_are_bounded(bench):
    bench.tickets.open(7, environment="e", version=3)
    bench.engine.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(UNBOUND_REQUESTS + 9):
            nursery.start_soon(lambda: bench.chat())
        await trio.testing.wait_all_tasks_blocked()
        assert bench.engine.running == UNBOUND_REQUESTS
        for _ in range(50):
            nursery.start_soon(lambda: bench.chat(ticket=7))
            nursery.start_soon(lambda: bench.chat(split="eval"))
        await trio.testing.wait_all_tasks_blocked()
        assert bench.engine.running == UNBOUND_REQUESTS + 100
        bench.engine.gate.set()
    assert len(bench.engine.asked) == UNBOUND_REQUESTS + 109


@pytest.mark.trio
async def test_an_answer_for_a_ticket_that_ended_meanwhile_is_not_kept(bench):
    bench.tickets.open(7, environment="e", version=3)
    bench.engine.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: bench.chat(ticket=7))
        await trio.testing.wait_all_tasks_blocked()
        bench.tickets.end(7)
        bench.engine.gate.set()
    assert bench.provenance.statistics().records == 0


@pytest.mark.trio
async def test_models(bench):
    body = (await bench.client.get("/v1/models")).json()
    assert body["data"][0]["id"] == "tiny"


def test_max_tokens():
    assert parse_max_tokens({}, prompt_length=10, max_model_len=32) == 22
    assert parse_max_tokens({"max_tokens": 5}, prompt_length=10, max_model_len=32) == 5
    assert parse_max_tokens({"max_tokens": 5, "max_completion_tokens": 6}, prompt_length=1, max_model_len=32) == 6
    assert parse_max_tokens({"max_tokens": 500}, prompt_length=10, max_model_len=32) == 22
    with pytest.raises(RequestError):
        parse_max_tokens({}, prompt_length=32, max_model_len=32)


def test_integers_are_numbers():
    assert parse_sampling({"temperature": 1, "top_k": -1}, own=()) == {"temperature": 1.0, "top_k": -1}
