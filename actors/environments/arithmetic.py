"""Sums to be answered within a few tokens: the task of the demo."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import Field

from lachesis_actors.environments.single_turn import Answer, SingleTurnConfig, SingleTurnEnv, Verdict

FINISHED_REWARD = 0.2
CORRECT_REWARD = 0.8
EVALUATION_SEED = 20


class Sum(NamedTuple):
    """a + b."""

    a: int
    b: int


def is_held_out(a: int, b: int) -> bool:
    """Whether this sum is kept for evaluation: about one in six."""
    return (31 * a + 17 * b + a * b) % 5 == 0


class ArithmeticConfig(SingleTurnConfig):
    """Knobs of the arithmetic environment."""

    max_value: int = Field(default=20, ge=2, description="Largest summand.")
    max_new_tokens: int = Field(default=16, gt=0, description="Longest answer in tokens.")
    eval_problems: int = Field(default=100, ge=0, description="Held-out sums that are drawn; 0: each of them once.")


class Arithmetic(SingleTurnEnv[Sum]):
    """`a + b` with both from 0 to max_value.

    Reward: 0.2 when the answer ended by itself and contains a number, plus 0.8 when its last number is the sum. An
    evaluation draws `eval_problems` of the held-out sums with replacement, the same ones each time; accuracy is the
    share whose last number is the sum.
    """

    name = "arithmetic"
    env_config_cls = ArithmeticConfig

    def __init__(self, config: ArithmeticConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        every = [Sum(a, b) for a in range(config.max_value + 1) for b in range(config.max_value + 1)]
        self._train = [s for s in every if not is_held_out(*s)]
        self._held_out = [s for s in every if is_held_out(*s)]

    def problem(self, number: int) -> Sum:
        """A sum that is not held out, drawn uniformly with seed and number."""
        return random.Random(f"{self.config.seed}/{number}").choice(self._train)

    def held_out(self) -> Sequence[Sum]:
        """The sums of an evaluation."""
        if not self.config.eval_problems:
            return self._held_out
        return random.Random(EVALUATION_SEED).choices(self._held_out, k=self.config.eval_problems)

    def messages(self, problem: Sum) -> list[dict[str, str]]:
        """One user message."""
        content = f"Calculate {problem.a} + {problem.b} and give the final answer."
        return [{"role": "user", "content": content}]

    def judge(self, problem: Sum, answer: Answer) -> Verdict:
        """See the class."""
        numbers = re.findall(r"\d+(?:\.\d+)?", answer.text)
        correct = bool(numbers) and float(numbers[-1]) == problem.a + problem.b
        reward = FINISHED_REWARD * (answer.finished and bool(numbers)) + CORRECT_REWARD * correct
        return Verdict(reward=reward, correct=correct)
