"""Environments whose episode is one answer to one prompt. They run under Lachesis and under Atropos's own server."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

Problem = TypeVar("Problem", bound=Hashable)

MASKED = -100
"""Atropos's mask value of a token that is not trained."""


class SingleTurnConfig(BaseEnvConfig):
    """Knobs of every single-turn environment, beside BaseEnv's own."""

    max_eval_workers: int = Field(default=64, gt=0, description="Evaluation requests under way at once.")
    max_new_tokens: int = Field(default=256, gt=0, description="Longest answer in tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature of training; evaluation is greedy.")
    eval_problems: int = Field(default=100, ge=0, description="Held-out problems of one evaluation; 0: all there are.")
    seed: int = Field(default=0, description="Seed of the order of training problems, the same in every actor.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sampled answer."""

    text: str
    """Decoded without special tokens."""
    tokens: int
    """Its length."""
    finished: bool
    """It ended by itself, not at the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an answer is worth."""

    reward: float
    correct: bool


class SingleTurnEnv(BaseEnv, Generic[Problem]):
    """One user message, one answer, one reward: a subclass says which problems there are and what answers are worth.

    A group is one request for all its answers (of eight at most: larger groups take several), token-in/token-out.
    Trained are the answer's tokens, the end-of-turn token included.
    """

    name = "single_turn"
    env_config_cls = SingleTurnConfig
    _next = 0

    @classmethod
    def config_init(cls) -> tuple[SingleTurnConfig, list[APIServerConfig]]:
        """Default configuration."""
        return cls.env_config_cls(), [APIServerConfig(server_type="vllm", base_url="http://localhost:9004/v1")]

    @abstractmethod
    def problem(self, number: int) -> Problem:
        """Problem `number`, from 0, of the endless stream to train on: the same one in every process of a run.

        It depends on the configuration and `number` alone. Numbers come in any order and, after a crash, again.
        """

    @abstractmethod
    def held_out(self) -> Sequence[Problem]:
        """The problems of an evaluation, always the same ones; none of them is ever trained on."""

    @abstractmethod
    def messages(self, problem: Problem) -> list[dict[str, str]]:
        """The chat that asks it."""

    @abstractmethod
    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """The worth of an answer."""

    async def setup(self) -> None:
        """Nothing to prepare."""

    def item(self, number: int) -> Problem:
        """Problem `number`: what Lachesis's runner asks for, with numbers that all actors share."""
        return self.problem(number)

    async def get_next_item(self) -> Problem:
        """The next problem by this process's own count: what Atropos's own loop asks for."""
        self._next += 1
        return self.problem(self._next - 1)

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup | None, list[Any]]:
        """One group. None when the prompt leaves no room for an answer within max_token_length."""
        prompt = self._prompt(item)
        if self._room(prompt) < 1:
            return None, []
        prompt, outputs, logprobs, answers = await self._sample(
            prompt, n=self.config.group_size, temperature=self.config.temperature, split="train"
        )
        group = ScoredDataGroup(
            tokens=[prompt + output for output in outputs],
            masks=[[MASKED] * len(prompt) + output for output in outputs],
            scores=[self.judge(item, answer).reward for answer in answers],
            inference_logprobs=[[1.0] * len(prompt) + values for values in logprobs],
        )
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Greedy answers to the held-out problems: share correct, mean reward, mean length, share that finished."""
        problems = Counter(self.held_out())
        limit = asyncio.Semaphore(self.config.max_eval_workers)

        async def one(problem: Problem) -> tuple[Verdict, Answer]:
            async with limit:
                *_, answers = await self._sample(self._prompt(problem), n=1, temperature=0.0, split="eval")
            return self.judge(problem, answers[0]), answers[0]

        results = await asyncio.gather(*(one(problem) for problem in problems))
        total = sum(problems.values())
        weighted = list(zip(results, problems.values(), strict=True))
        metrics = {
            "accuracy": sum(times * verdict.correct for (verdict, _), times in weighted) / total,
            "reward": sum(times * verdict.reward for (verdict, _), times in weighted) / total,
            "tokens": sum(times * answer.tokens for (_, answer), times in weighted) / total,
            "finished": sum(times * answer.finished for (_, answer), times in weighted) / total,
        }
        await self.evaluate_log(metrics, verbose=False)
        return metrics

    def _prompt(self, problem: Problem) -> list[int]:
        chat = self.messages(problem)
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)

    def _room(self, prompt: list[int]) -> int:
        return min(self.config.max_new_tokens, self.config.max_token_length - len(prompt))

    async def _sample(
        self, prompt: list[int], *, n: int, temperature: float, split: str
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[Answer]]:
        prompt, outputs, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            input_ids=prompt,
            n=n,
            max_tokens=max(1, self._room(prompt)),
            temperature=temperature,
            top_p=1.0,
            split=split,
        )
        answers = [
            Answer(
                text=self.tokenizer.decode(output, skip_special_tokens=True),
                tokens=len(output),
                finished=reason == "stop",
            )
            for output, reason in zip(outputs, reasons, strict=True)
        ]
        return prompt, outputs, logprobs, answers
