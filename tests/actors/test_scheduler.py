"""The salted scheduler's rule, on vLLM's own scheduler class without an engine around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from lachesis_actors.scheduler import SaltedScheduler


class FakeRequest(SimpleNamespace):
    """The fields of a request that the salt needs; its hashes show the salt that they were made with."""

    def __init__(self, *, status: RequestStatus = RequestStatus.WAITING, computed: int = 0) -> None:
        super().__init__(status=status, num_computed_tokens=computed, cache_salt=None, block_hashes=["unsalted"])

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"of {self.cache_salt}")


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    def construct(self: Any) -> None:
        self.waiting, self._pause_state = [], PauseState.UNPAUSED

    monkeypatch.setattr(Scheduler, "__init__", construct)
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: self.waiting.append(request))
    return SaltedScheduler()


def hashes(*requests: FakeRequest) -> list[list[str]]:
    return [request.block_hashes for request in requests]


def test_requests_of_different_epochs_share_no_blocks(scheduler: Any) -> None:
    first, second = FakeRequest(), FakeRequest()
    scheduler.add_request(first)
    first.status = RequestStatus.RUNNING
    scheduler.waiting.clear()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    scheduler.add_request(second)
    assert hashes(first, second) == [["of epoch 0"], ["of epoch 1"]]


def test_who_has_not_started_belongs_to_the_epoch_in_which_it_will(scheduler: Any) -> None:
    before, during = FakeRequest(), FakeRequest()
    started = FakeRequest(computed=32)
    preempted = FakeRequest(status=RequestStatus.PREEMPTED)
    for request in (before, started, preempted):
        scheduler.add_request(request)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.add_request(during)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert hashes(before, during) == [["of epoch 1"]] * 2
    assert hashes(started, preempted) == [["of epoch 0"]] * 2


def test_a_resume_without_a_pause_changes_nothing(scheduler: Any) -> None:
    request = FakeRequest()
    scheduler.add_request(request)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert hashes(request) == [["of epoch 0"]]
