from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import trio
import trio.testing
from starlette.applications import Starlette

from lachesis_actors.provenance import Provenance, Record
from lachesis_actors.runner_routes import RunnerRoutes
from lachesis_actors.tickets import Tickets
from lachesis_actors.trajectory_api import HELD_POSTS, TrajectoryApi
from lachesis_configs.schema import Config
from lachesis_transport.client import QueueError, QueueState, Welcome
from lachesis_transport.messages import Group, Scores
from lachesis_transport.producer import Finished, PutReply, Ticket


@dataclass
class FakeProducer:
    """The queue's client as a table of answers."""

    state: QueueState = field(default_factory=lambda: QueueState(current=3, step=4, finished=False, final=None))
    welcome: Welcome = field(default_factory=lambda: Welcome(run_name="r", batch_groups=8, staleness_max=2, steps=40))
    put_groups: list[tuple[Group, bool]] = field(default_factory=list)
    voided: list[tuple[int, str, Scores | None]] = field(default_factory=list)
    reports: list[tuple[str, dict]] = field(default_factory=list)
    reply: PutReply | Exception = field(default_factory=lambda: PutReply("accepted"))
    away: trio.Event | None = None
    grants: bool = True
    finished: bool = False
    issued: int = 0

    async def ticket(self, *, version, environment):
        if not self.grants:
            await trio.sleep_forever()
        if self.finished:
            return Finished()
        self.issued += 1
        return Ticket(ticket=self.issued, deadline=version + 2, version=version, item=100 + self.issued)

    async def void(self, ticket, reason, scores=None):
        self.voided.append((ticket, reason, scores))

    async def put(self, group, final=True):
        if self.away is not None:
            await self.away.wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        self.put_groups.append((group, final))
        return self.reply

    def report(self, kind, **fields):
        self.reports.append((kind, fields))


class Bench:
    """The API over a fake queue, reached through ASGI."""

    def __init__(self, *, advantages: str = "group", opened: bool = True) -> None:
        config = Config()
        self.config = config.model_copy(update={"actor": config.actor.model_copy(update={"advantages": advantages})})
        self.producer = FakeProducer()
        self.tickets = Tickets()
        self.provenance = Provenance()
        self.api = TrajectoryApi(
            config=self.config,
            actor="actor-0",
            folder=Path("/run"),
            producer=self.producer,
            tickets=self.tickets,
            provenance=self.provenance,
        )
        runner = RunnerRoutes(
            actor="actor-0",
            api=self.api,
            producer=self.producer,
            tickets=self.tickets,
            provenance=self.provenance,
        )
        if opened:
            self.api.serve(3)
        app = Starlette(routes=[*self.api.routes(), *runner.routes()])
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=True),
            base_url="http://actor",
            timeout=None,
            trust_env=False,
        )

    async def call(self, method: str, route: str, body=None) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        return await self.client.request(method, route, content=content)

    async def take_ticket(self) -> int:
        return (await self.call("POST", "/lachesis/ticket", {"environment": "sums"})).json()["ticket"]

    def sampled(self, ticket: int | None, *answers: tuple[int, ...]) -> None:
        prompt = np.array([10, 11], np.int32)
        records = [
            Record(
                prompt_ids=prompt,
                output_ids=np.array(answer, np.int32),
                logprobs=np.full(len(answer), -0.25, np.float32),
                versions=np.full(len(answer), 3, np.int32),
                finish_reason="stop",
            )
            for answer in answers
        ]
        self.provenance.add(ticket, records, now=0.0)


def posted(ticket: int | None, *answers: tuple[int, ...], scores=(1.0, 0.0), **changes) -> dict:
    return {
        "tokens": [[10, 11, *a] for a in answers],
        "masks": [[-100, -100, *a] for a in answers],
        "scores": list(scores),
        "group_overrides": {} if ticket is None else {"lachesis_ticket": ticket},
        "overrides": None,
        "ref_logprobs": None,
        "env_id": 0,
        **changes,
    }


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.trio
async def test_a_scored_group_becomes_a_group_of_the_queue(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    response = await bench.call("POST", "/scored_data", posted(ticket, (20, 2), (21, 2)))
    assert response.json() == {"status": "received", "group": "1:0", "put": "accepted"}
    ((group, final),) = bench.producer.put_groups
    assert final
    assert (group.ticket, group.actor, group.environment) == (1, "actor-0", "sums")
    one = 0.5 / (0.5 + 1e-6)
    assert group.trajectories[0].advantages.tolist() == pytest.approx([0, 0, one, one])
    assert group.trajectories[1].advantages.tolist() == pytest.approx([0, 0, -one, -one])
    assert group.trajectories[0].logprobs.tolist() == [0, 0, -0.25, -0.25]
    assert group.trajectories[0].versions.tolist() == [-1, -1, 3, 3]
    assert [t.score for t in group.trajectories] == [1.0, 0.0]
    group.validate()
    assert bench.tickets.live(ticket) is None
    assert bench.provenance.statistics().records == 0


@pytest.mark.trio
async def test_releasing_a_scored_ticket_does_nothing(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    await bench.call("POST", "/scored_data", posted(ticket, (20, 2), (21, 2)))
    await bench.call("POST", "/lachesis/release", {"ticket": ticket, "reason": "done"})
    assert bench.producer.voided == []


@pytest.mark.trio
async def test_releasing_an_unscored_ticket_voids_it_with_the_reason(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2))
    assert (await bench.call("POST", "/lachesis/release", {"ticket": ticket, "reason": "failed"})).json() == {}
    await bench.call("POST", "/lachesis/release", {"ticket": ticket, "reason": "failed"})
    assert bench.producer.voided == [(1, "failed", None)]
    assert bench.provenance.statistics().records == 0


@pytest.mark.trio
async def test_a_ticket_comes_with_the_number_of_its_item(bench):
    response = await bench.call("POST", "/lachesis/ticket", {"environment": "sums"})
    assert response.json() == {"ticket": 1, "version": 3, "item": 101}


@pytest.mark.trio
async def test_the_item_of_a_group_that_the_environment_dropped_is_used(bench):
    ticket = await bench.take_ticket()
    await bench.call("POST", "/lachesis/release", {"ticket": ticket, "reason": "dropped_by_environment"})
    other = await bench.take_ticket()
    await bench.call("POST", "/lachesis/release", {"ticket": other, "reason": "no_item"})
    assert bench.producer.voided == [(1, "dropped_by_environment", Scores()), (2, "no_item", None)]


@pytest.mark.trio
async def test_a_refused_group_gives_its_reason_to_the_void(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    response = await bench.call("POST", "/scored_data", posted(ticket, (20, 2), (77, 2)))
    assert response.status_code == 400
    assert response.json()["reason"] == "mismatch"
    assert "sequence 1, position 2" in response.json()["detail"]
    assert bench.api.refused["mismatch"] == 1
    await bench.call("POST", "/lachesis/release", {"ticket": ticket, "reason": "released"})
    assert bench.producer.voided == [(1, "mismatch", None)]


@pytest.mark.trio
async def test_a_group_posted_again_gets_the_same_answer_and_is_put_once(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    body = posted(ticket, (20, 2), (21, 2))
    first = await bench.call("POST", "/scored_data", body)
    again = await bench.call("POST", "/scored_data", body)
    assert (again.status_code, again.json()) == (200, first.json())
    assert len(bench.producer.put_groups) == 1
    other = await bench.call("POST", "/scored_data", posted(ticket, (20, 2), (21, 2), scores=(0.0, 1.0)))
    assert other.status_code == 409


@pytest.mark.trio
async def test_a_group_posted_again_while_the_first_is_held_is_put_once(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    bench.producer.away = trio.Event()
    answers = []

    async def post():
        answers.append((await bench.call("POST", "/scored_data", posted(ticket, (20, 2), (21, 2)))).json())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(post)
        nursery.start_soon(post)
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        bench.producer.away.set()
    assert answers == [{"status": "received", "group": "1:0", "put": "accepted"}] * 2
    assert len(bench.producer.put_groups) == 1


@pytest.mark.trio
async def test_held_posts_are_bounded(bench):
    bench.producer.away = trio.Event()
    n = HELD_POSTS + 5
    for i in range(n):
        bench.sampled(None, (20 + i, 2), (2, 2))
    done = []

    async def post(i):
        done.append((await bench.call("POST", "/scored_data", posted(None, (20 + i, 2), (2, 2)))).status_code)

    async with trio.open_nursery() as nursery:
        for i in range(n):
            nursery.start_soon(post, i)
        await trio.testing.wait_all_tasks_blocked()
        assert bench.api._held.borrowed_tokens == HELD_POSTS
        # other routes go on
        assert (await bench.call("GET", "/lachesis/state")).status_code == 200
        assert "ticket" in (await bench.call("POST", "/lachesis/ticket", {"environment": "e"})).json()
        bench.producer.away.set()
    assert done == [200] * n
    assert bench.api._posting == {}


@pytest.mark.trio
async def test_no_variance_voids_the_ticket_with_its_scores(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    response = await bench.call("POST", "/scored_data", posted(ticket, (20, 2), (21, 2), scores=(0.5, 0.5)))
    assert response.json() == {"status": "received", "put": "no_variance"}
    assert bench.producer.put_groups == []
    assert bench.producer.voided == [(1, "no_variance", Scores(groups=1, sequences=2, total=1.0, squares=0.5))]
    await bench.call("POST", "/lachesis/release", {"ticket": ticket, "reason": "released"})
    assert len(bench.producer.voided) == 1


@pytest.mark.trio
async def test_given_advantages_rescue_a_group_without_variance(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    advantages = [[0, 0, 1.5, 2.5], [0, 0, -1, -2]]
    body = posted(ticket, (20, 2), (21, 2), scores=(0.5, 0.5), advantages=advantages)
    await bench.call("POST", "/scored_data", body)
    assert bench.producer.put_groups[0][0].trajectories[0].advantages.tolist() == [0, 0, 1.5, 2.5]


@pytest.mark.trio
async def test_given_mode_refuses_groups_without_them():
    bench = Bench(advantages="given")
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    response = await bench.call("POST", "/scored_data", posted(ticket, (20, 2), (21, 2)))
    assert (response.status_code, response.json()["reason"]) == (400, "advantages")


@pytest.mark.trio
async def test_the_templates_tail_is_not_trained(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    await bench.call("POST", "/scored_data", posted(ticket, (20, 2, 99), (21, 2, 99)))
    trajectory = bench.producer.put_groups[0][0].trajectories[0]
    assert trajectory.mask.tolist() == [0, 0, 1, 1, 0]
    assert trajectory.advantages[-1] == 0
    assert bench.api.counts["trimmed"] == 2


@pytest.mark.trio
async def test_a_list_of_groups_shares_one_ticket(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2), (22, 2), (23, 2), (24, 2), (25, 2))
    bodies = [
        posted(ticket, (20, 2), (21, 2)),
        posted(ticket, (24, 2), (25, 2), scores=(1.0, 1.0)),
        posted(ticket, (22, 2), (23, 2)),
    ]
    response = await bench.call("POST", "/scored_data_list", bodies)
    assert response.json()["groups_processed"] == 3
    assert [answer["put"] for answer in response.json()["groups"]] == ["accepted", "no_variance", "accepted"]
    assert [(g.group_id, final) for g, final in bench.producer.put_groups] == [("1:0", False), ("1:2", True)]
    assert bench.producer.voided == []


@pytest.mark.trio
async def test_a_group_without_a_ticket_gets_one_when_it_is_posted(bench):
    bench.sampled(None, (20, 2), (21, 2))
    body = posted(None, (20, 2), (21, 2))
    response = await bench.call("POST", "/scored_data", body)
    assert response.json() == {"status": "received", "group": "1:0", "put": "accepted"}
    assert bench.producer.put_groups[0][0].ticket == 1
    assert (await bench.call("POST", "/scored_data", body)).json() == response.json()
    assert len(bench.producer.put_groups) == 1

    bench.sampled(None, (20, 2), (21, 2))
    flat = posted(None, (20, 2), (21, 2), scores=(0.0, 0.0))
    assert (await bench.call("POST", "/scored_data", flat)).json()["put"] == "no_variance"
    assert [(ticket, reason) for ticket, reason, _ in bench.producer.voided] == [(2, "no_variance")]

    bench.producer.finished = True
    bench.sampled(None, (22, 2), (23, 2))
    last = await bench.call("POST", "/scored_data", posted(None, (22, 2), (23, 2)))
    assert last.json() == {"status": "received", "put": "finished"}


@pytest.mark.trio
async def test_a_group_without_a_ticket_that_the_queue_refuses_gives_its_ticket_back(bench):
    bench.sampled(None, (20, 2), (21, 2))
    bench.producer.reply = PutReply("invalid", "why not")
    assert (await bench.call("POST", "/scored_data", posted(None, (20, 2), (21, 2)))).status_code == 400
    assert [(ticket, reason) for ticket, reason, _ in bench.producer.voided] == [(1, "invalid")]


@pytest.mark.parametrize(
    ("reply", "status", "put"),
    [
        (PutReply("duplicate"), 200, "duplicate"),
        (PutReply("stale", "too old"), 200, "stale"),
        (PutReply("invalid", "tokens: 3"), 400, None),
        (QueueError("unknown ticket"), 400, None),
    ],
)
@pytest.mark.trio
async def test_the_queues_answers(bench, reply, status, put):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    bench.producer.reply = reply
    response = await bench.call("POST", "/scored_data", posted(ticket, (20, 2), (21, 2)))
    assert response.status_code == status
    assert response.json().get("put") == put


@pytest.mark.parametrize(
    "body",
    [
        posted(1, (20, 2), (21, 2), scores=(math.nan, 0.0)),
        posted(1, (20, 2), (21, 2), masks=[[-100, -100, 20]]),
        posted(1, (20, 2), (21, 2), scores=("1", 0.0)),
        posted(9, (20, 2), (21, 2)),
        [],
        "x",
        7,
        {},
    ],
)
@pytest.mark.trio
async def test_invalid_posts_are_answered_4xx(bench, body):
    await bench.take_ticket()
    for route in ("/scored_data", "/scored_data_list"):
        response = await bench.call("POST", route, body)
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["detail"]
    assert bench.producer.put_groups == []


@pytest.mark.trio
async def test_zipped_posts(bench):
    ticket = await bench.take_ticket()
    bench.sampled(ticket, (20, 2), (21, 2))
    content = gzip.compress(json.dumps(posted(ticket, (20, 2), (21, 2))).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    response = await bench.client.post("/scored_data", content=content, headers=headers)
    assert response.status_code == 200
    assert (await bench.client.post("/scored_data", content=b"junk", headers=headers)).status_code == 400


@pytest.mark.trio
async def test_registration_as_atropos_does_it(bench):
    body = {
        "max_token_length": 512, "desired_name": "sums", "weight": 1.0, "group_size": 8, "min_batch_allocation": None,
    }  # fmt: skip
    first = (await bench.call("POST", "/register-env", body)).json()
    assert first == {
        "status": "success", "env_id": 0, "wandb_name": "sums_0", "checkpoint_dir": "/run/actor-0",
        "starting_step": 0, "checkpoint_interval": 0, "num_steps": 40,
    }  # fmt: skip
    assert (await bench.call("POST", "/register-env", {**body, "desired_name": None})).json()["env_id"] == 1
    status = (await bench.call("GET", "/status-env", {"env_id": 0})).json()
    assert status == {
        "current_step": 4, "queue_size": 0, "unallocated_fraction": 1.0, "self_queue_size": 0,
        "max_group_size": 8, "env_weight": 1.0,
    }  # fmt: skip
    assert (await bench.call("GET", "/status-env", {"env_id": 5})).status_code == 404
    assert (await bench.call("GET", "/status")).json() == {"current_step": 4, "queue_size": 0}
    info = (await bench.call("GET", "/info")).json()
    assert info["batch_size"] >= 1 << 20
    assert info["max_token_len"] == 1025
    assert (await bench.call("POST", "/disconnect-env", {"env_id": 0})).json() == {"status": "success"}
    assert (await bench.call("GET", "/wandb_info")).json() == {"group": "run", "project": "lachesis"}


@pytest.mark.trio
async def test_environments_wait_for_the_first_version():
    bench = Bench(opened=False)
    body = {"desired_name": "sums", "group_size": 8}
    assert (await bench.call("POST", "/register-env", body)).json() == {"status": "wait for trainer to start"}


@pytest.mark.trio
async def test_the_trainers_routes_say_where_batches_come_from(bench):
    for method, route in (("POST", "/register"), ("GET", "/batch"), ("GET", "/reset_data")):
        response = await bench.call(method, route)
        assert response.status_code == 409
        assert "queue" in response.json()["detail"]


@pytest.mark.trio
async def test_the_latest_example(bench):
    assert (await bench.call("GET", "/latest_example")).json()["tokens"] == []
    bench.sampled(None, (20, 2), (21, 2))
    await bench.call("POST", "/scored_data", posted(None, (20, 2), (21, 2)))
    assert (await bench.call("GET", "/latest_example")).json()["tokens"] == [[10, 11, 20, 2], [10, 11, 21, 2]]


@pytest.mark.trio
async def test_a_ticket_that_is_not_granted_is_answered_with_wait(bench, autojump_clock):
    bench.producer.grants = False
    response = await bench.call("POST", "/lachesis/ticket", {"environment": "sums"})
    assert set(response.json()) == {"wait"}
    assert trio.current_time() == pytest.approx(30, abs=1)


@pytest.mark.trio
async def test_tickets_wait_for_the_first_version(autojump_clock):
    bench = Bench(opened=False)
    response = await bench.call("POST", "/lachesis/ticket", {"environment": "sums"})
    assert response.json() == {"wait": "the first published version"}


@pytest.mark.trio
async def test_tickets_of_a_finished_run(bench):
    bench.producer.finished = True
    assert (await bench.call("POST", "/lachesis/ticket", {"environment": "e"})).json() == {"finished": True}


@pytest.mark.trio
async def test_evaluations_are_reported(bench):
    body = {"environment": "sums", "metrics": {"accuracy": 0.5, "n": 8}, "version": None}
    assert (await bench.call("POST", "/lachesis/evaluation", body)).json() == {}
    expected = {"environment": "sums", "version": 3, "metrics": {"accuracy": 0.5, "n": 8.0}}
    assert bench.producer.reports == [("evaluation", expected)]
    for bad in ({"accuracy": math.nan}, {"accuracy": "1"}, {"accuracy": True}, [1]):
        assert (await bench.call("POST", "/lachesis/evaluation", {**body, "metrics": bad})).status_code == 400


@pytest.mark.trio
async def test_the_state_of_the_run(bench):
    assert (await bench.call("GET", "/lachesis/state")).json() == {
        "actor": "actor-0", "version": 3, "step": 4, "steps": 40,
        "finished": False, "final": None, "served_final": False,
    }  # fmt: skip
    bench.producer.state = replace(bench.producer.state, finished=True, final=5)
    assert (await bench.call("GET", "/lachesis/state")).json()["served_final"] is False
    bench.api.serve(5)
    assert (await bench.call("GET", "/lachesis/state")).json()["served_final"] is True
