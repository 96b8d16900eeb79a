"""vLLM's scheduler with a prefix cache that never mixes policy versions, for `activation.kv: keep`.

Weights change only while the engine is paused, so the pauses divide time into epochs. Each request's blocks are hashed
with the epoch in which it is first scheduled: what was computed before a pause is found by nobody who starts after it.
A salt that the client chose could be a version old by the time its request is scheduled; here the engine itself
chooses, in the one thread that also schedules. Requests that have started keep their epoch, and the keys and values
that they have.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


def salt(request: Request, epoch: int) -> None:
    """Hash the request's blocks as ones of this epoch."""
    request.cache_salt = f"epoch {epoch}"
    request.block_hashes.clear()
    request.update_block_hashes()


class _Salted(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epoch = 0

    def add_request(self, request: Request) -> None:
        salt(request, self._epoch)
        super().add_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state == PauseState.UNPAUSED and self.pause_state != PauseState.UNPAUSED:
            self._epoch += 1
            for request in self.waiting:
                if request.status == RequestStatus.WAITING and request.num_computed_tokens == 0:
                    salt(request, self._epoch)
        super().set_pause_state(pause_state)


class SaltedScheduler(_Salted):
    """For an engine that schedules between its steps (on CPUs)."""


class SaltedAsyncScheduler(_Salted, AsyncScheduler):
    """For an engine that schedules the next step while one runs (vLLM's default on GPUs)."""
