"""The actor's side of publication: follows the publisher, stages versions in the engine's workers, activates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from lachesis_configs.schema import Config

if TYPE_CHECKING:
    from lachesis_actors.engine import Engine


async def follow_weights(
    *,
    config: Config,
    actor: str,
    engine: Engine,
    report: Callable[..., None],
    on_active: Callable[[int], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep the engine at the newest published version.

    Joins the publisher at weights.address (waits for it, logging), stages each version in the receiver threads of the
    engine's workers while generation goes on, then activates the newest: pause, update, label, read back, resume.

    Args:
        config: the run's.
        actor: this actor's name, the member's name at the publisher.
        engine: started, not yet labelled.
        report: called as report(kind, **fields): "activation" with version, stage_seconds, pause_seconds, checksum and
            bytes; "checksum_mismatch" with version; "healed" with version and bytes.
        on_active: called with each version once the engine serves it and says so.

    Reports started when the engine serves a published version. Runs until cancelled; returns quietly, with the last
    version active, when the publisher says that it has finished. Raises ActivationFailed when the engine can no longer
    be trusted; the actor then ends with that cause and comes back with a fresh engine.
    """
    raise NotImplementedError
