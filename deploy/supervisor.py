"""Supervision of the roles of one run: one fails, all end; all end, none is left."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from lachesis_deploy.processes import Child, Command, Descendants

logger = logging.getLogger("lachesis.launch")

GRACE_SECONDS = 30.0
"""What a role gets to finish or hand back what it holds after SIGTERM."""

LEAVE_SECONDS = 15.0
"""What the children of a role that has ended get to follow it (an engine gets 10 s from its keeper)."""


class RoleFailed(Exception):
    """A role ended before the run did. The text names it, how it ended and what its log says at the end."""

    def __init__(self, child: Child, *, early: bool) -> None:
        self.role = child.role
        what = " before the run was finished" if early else ""
        lines = "\n".join(f"    {line}" for line in child.last_words()) or "    (empty)"
        super().__init__(f"{child.role} {child.ending()}{what}. Its log {child.log} ends with:\n{lines}")


async def supervise(
    commands: Sequence[Command],
    *,
    logs: Path,
    finished: Callable[[], bool] = lambda: True,
    hurry: trio.Event | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """Start every command and return when all have ended with code 0.

    The first that ends otherwise, or that ends while `finished()` is false, ends the others: SIGTERM, after
    `grace_seconds` or when `hurry` is set SIGKILL to their process groups, and those with `ends_last` after the rest;
    then RoleFailed is raised. A cancellation ends them the same way. In every case no process that came from them is
    left on return.
    """
    descendants = Descendants()
    hurry = trio.Event() if hurry is None else hurry
    children: list[Child] = []
    failures: list[RoleFailed] = []

    async def watch(child: Child, scope: trio.CancelScope) -> None:
        code = await child.wait()
        if failures:
            return
        if code or not finished():
            failures.append(RoleFailed(child, early=not code))
            scope.cancel()
        else:
            logger.info("%s has finished", child.role)

    try:
        async with trio.open_nursery() as nursery:
            for command in commands:
                children.append(Child(command, log=logs / f"{command.role}.log"))
                nursery.start_soon(watch, children[-1], nursery.cancel_scope)
    finally:
        with trio.CancelScope(shield=True):
            await _end(children, descendants, hurry=hurry, grace_seconds=grace_seconds)
    if failures:
        raise failures[0]


async def _end(children: list[Child], descendants: Descendants, *, hurry: trio.Event, grace_seconds: float) -> None:
    for last in (False, True):
        together = [child for child in children if child.ends_last is last]
        await _end_together(together, hurry=hurry, grace_seconds=grace_seconds)
    for line in await descendants.end(patience=0 if hurry.is_set() else LEAVE_SECONDS):
        logger.warning("killed a process that outlived its role: %s", line)


async def _end_together(children: list[Child], *, hurry: trio.Event, grace_seconds: float) -> None:
    running = [child for child in children if child.code is None]
    for child in running:
        child.terminate()
    if running:
        logger.info("waiting for %s to end", ", ".join(child.role for child in running))

    async def leave(child: Child) -> None:
        await child.wait()

    async def hurried(scope: trio.CancelScope) -> None:
        await hurry.wait()
        scope.cancel()

    with trio.move_on_after(grace_seconds if running else math.inf) as scope:
        async with trio.open_nursery() as outer:
            outer.start_soon(hurried, scope)
            async with trio.open_nursery() as inner:
                for child in running:
                    inner.start_soon(leave, child)
            outer.cancel_scope.cancel()
    for child in children:
        if child.code is None:
            why = "at once" if hurry.is_set() else f"within {grace_seconds:.0f} s"
            logger.warning("%s did not end %s and is killed", child.role, why)
            child.kill()
        await child.wait()
        child.close()
