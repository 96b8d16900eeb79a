"""Grade-school word problems (GSM8K, arXiv 2110.14168) from a folder with train.jsonl and test.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from lachesis_actors.environments.epochs import Epochs
from lachesis_actors.environments.single_turn import Answer, SingleTurnConfig, SingleTurnEnv, Verdict

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class WordProblem(NamedTuple):
    """A question and its number."""

    question: str
    answer: float


class Gsm8kConfig(SingleTurnConfig):
    """Knobs of the GSM8K environment."""

    data: str = Field(default="data/gsm8k", description="Folder with train.jsonl and test.jsonl.")
    instruction: str = Field(
        default="Think step by step and end with the final answer, a number, after ####.",
        description="What is asked for after the question.",
    )
    max_new_tokens: int = Field(default=512, gt=0, description="Longest answer in tokens.")
    format_reward: float = Field(
        default=0.0, ge=0, description="Further reward of an answer that ended by itself and marks its final number."
    )
    eval_problems: int = Field(default=200, ge=0, description="First problems of the test split to evaluate; 0: all.")

    @field_validator("data")
    @classmethod
    def _has_the_files(cls, value: str) -> str:
        for name in ("train.jsonl", "test.jsonl"):
            if not (Path(value).expanduser() / name).is_file():
                raise ValueError(f"a folder with GSM8K's train.jsonl and test.jsonl; it has no {name}")
        return value


def marked_number(text: str) -> float | None:
    """The number after the last ####, or else in the last \\boxed{}; None when neither is there."""
    _, marker, after = text.rpartition("####")
    if marker and (number := NUMBER.search(after)):
        return _value(number.group())
    boxed = BOXED.findall(text)
    if boxed and (number := NUMBER.search(boxed[-1])):
        return _value(number.group())
    return None


def final_number(text: str) -> float | None:
    """The marked number, or else the last number of the text; None when there is none."""
    marked = marked_number(text)
    if marked is not None:
        return marked
    numbers = NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def read_problems(path: Path) -> list[WordProblem]:
    """The problems of one file: a JSON object a line with question and answer, the number after ####.

    Raises ValueError, naming option, file and line, for anything else.
    """
    if not path.is_file():
        raise ValueError(f"data: value {str(path.parent)!r} has no {path.name}, expected a folder with GSM8K's files")
    problems = []
    with open(path, encoding="utf-8") as lines:
        for at, line in enumerate(lines, start=1):
            try:
                item = json.loads(line)
                question, solution = item["question"], item["answer"]
                answer = marked_number(solution)
            except (ValueError, KeyError, TypeError):
                answer = None
            if answer is None:
                raise ValueError(f"data: {path}, line {at}: expected an object with question and answer (#### number)")
            problems.append(WordProblem(question, answer))
    if not problems:
        raise ValueError(f"data: {path} is empty, expected a problem a line")
    return problems


class Gsm8k(SingleTurnEnv[WordProblem]):
    """Word problems with a number for an answer.

    Reward: 1 when the final number (after ####, in \\boxed{}, or the last one) is right, plus `format_reward` when the
    answer ended by itself and marks that number. Training goes through train.jsonl epoch by epoch, each in an order of
    its own that the seed gives; evaluation takes the first `eval_problems` of test.jsonl.
    """

    name = "gsm8k"
    env_config_cls = Gsm8kConfig

    def __init__(self, config: Gsm8kConfig, *args: Any, **kwargs: Any) -> None:
        folder = Path(config.data).expanduser()
        self._train = read_problems(folder / "train.jsonl")
        test = read_problems(folder / "test.jsonl")
        self._test = test[: config.eval_problems or len(test)]
        self._order = Epochs(len(self._train), seed=config.seed)
        super().__init__(config, *args, **kwargs)

    def problem(self, number: int) -> WordProblem:
        """Each problem of the training split once in each epoch of as many numbers."""
        return self._train[self._order[number]]

    def held_out(self) -> Sequence[WordProblem]:
        """The first problems of the test split."""
        return self._test

    def messages(self, problem: WordProblem) -> list[dict[str, str]]:
        """One user message."""
        return [{"role": "user", "content": f"{problem.question}\n{self.config.instruction}"}]

    def judge(self, problem: WordProblem, answer: Answer) -> Verdict:
        """See the class."""
        correct = final_number(answer.text) == problem.answer
        well_formed = answer.finished and marked_number(answer.text) is not None
        return Verdict(reward=float(correct) + self.config.format_reward * well_formed, correct=correct)
