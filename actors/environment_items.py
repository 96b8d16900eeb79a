"""Which item an environment trains under a ticket: the queue numbers them, the environment knows what they are."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from atroposlib.envs.base import BaseEnv

logger = logging.getLogger("lachesis.environment")


class EnvironmentItems:
    """The items of one environment, by number. Construct it after the environment's set-up.

    Three kinds of environments, the first with the whole promise (each number is one item, in every process):

    - those with a method `item(number)`, plain or async;
    - those that count in an integer `iter`, as Atropos's own do: it is set to the number before `get_next_item()`;
    - others are asked for items as they come.

    What an environment put on its own backlog goes first, in place of the item of that number.
    """

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        self._named = callable(getattr(env, "item", None))
        if not self._named and not self._counts():
            logger.warning(
                "%s has neither item(number) nor a counter iter: its items come in its own order, which other actors "
                "and a restart do not know",
                type(env).__name__,
            )

    async def get(self, number: int) -> Any | None:
        """Item `number`, from 0; None when the environment has none now. Raises what the environment raises."""
        env: Any = self._env
        if env.backlog:
            return env.backlog.pop()
        if self._named:
            item = env.item(number)
            return await item if inspect.isawaitable(item) else item
        if self._counts():
            env.iter = number
        return await env.get_next_item()

    def _counts(self) -> bool:
        return type(getattr(self._env, "iter", None)) is int
