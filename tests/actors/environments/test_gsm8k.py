from __future__ import annotations

import json
from pathlib import Path

import pytest

from lachesis_actors.environments.gsm8k import (
    Gsm8k,
    Gsm8kConfig,
    WordProblem,
    final_number,
    marked_number,
    read_problems,
)
from lachesis_actors.environments.single_turn import Answer

REAL = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "marked", "final"),
    [
        ("3 * 4 = 12\n#### 12", 12.0, 12.0),
        ("#### 1,234.50 dollars, 7", 1234.5, 1234.5),
        ("#### $-5", -5.0, -5.0),
        ("so \\boxed{1} and then \\boxed{\\$42}", 42.0, 42.0),
        ("#### none, but 3 and 4.", 3.0, 3.0),
        ("we get 3 and then 4.", None, 4.0),
        ("#### 5 \\boxed{6}", 5.0, 5.0),
        ("nothing", None, None),
        ("", None, None),
    ],
)
def test_numbers(text, marked, final):
    assert marked_number(text) == marked
    assert final_number(text) == final


@pytest.fixture
def data(tmp_path):
    for name, n in (("train", 5), ("test", 3)):
        lines = [json.dumps({"question": f"{name} {i}?", "answer": f"because\n#### {i}"}) for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def make(tiny_model, data, **options) -> Gsm8k:
    config = Gsm8kConfig(tokenizer_name=str(tiny_model), use_wandb=False, data=str(data), **options)
    server = Gsm8k.config_init()[1][0].model_copy(update={"model_name": str(tiny_model), "api_key": "x"})
    return Gsm8k(config, [server])


def test_training_takes_each_problem_once_an_epoch(tiny_model, data):
    env, same = make(tiny_model, data, seed=1), make(tiny_model, data, seed=1)
    for start in (0, 5, 500):
        numbers = range(start, start + 5)
        assert sorted(env.problem(n).question for n in numbers) == [f"train {i}?" for i in range(5)]
        assert [env.item(n) for n in numbers] == [same.item(n) for n in numbers]


def test_evaluation_takes_the_first_test_problems(tiny_model, data):
    assert [p.question for p in make(tiny_model, data, eval_problems=2).held_out()] == ["test 0?", "test 1?"]
    assert len(make(tiny_model, data, eval_problems=0).held_out()) == 3


@pytest.mark.parametrize(
    ("text", "finished", "reward", "correct"),
    [
        ("so\n#### 12", True, 1.25, True),
        ("so\n#### 12", False, 1.0, True),
        ("so 12", True, 1.0, True),
        ("so\n#### 13", True, 0.25, False),
        ("no idea", True, 0.0, False),
    ],
)
def test_reward(tiny_model, data, text, finished, reward, correct):
    env = make(tiny_model, data, format_reward=0.25)
    verdict = env.judge(WordProblem("?", 12.0), Answer(text=text, tokens=3, finished=finished))
    assert (verdict.reward, verdict.correct) == (reward, correct)


def test_files_that_are_not_gsm8k(tmp_path):
    with pytest.raises(ValueError, match=r"data: value '.*' has no train\.jsonl"):
        read_problems(tmp_path / "train.jsonl")
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "two"}')
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: expected an object with question and answer"):
        read_problems(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"train\.jsonl is empty"):
        read_problems(path)


@pytest.mark.skipif(not REAL.is_dir(), reason="GSM8K is not there")
def test_the_real_files():
    train, test = read_problems(REAL / "train.jsonl"), read_problems(REAL / "test.jsonl")
    assert (len(train), len(test)) == (7473, 1319)
    assert train[0].answer == 72.0
    assert test[0].answer == 18.0
