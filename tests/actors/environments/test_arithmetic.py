from __future__ import annotations

import pytest
import trio

from lachesis_actors.environments.arithmetic import Arithmetic, ArithmeticConfig, Sum, is_held_out
from lachesis_actors.environments.single_turn import Answer


@pytest.fixture
def env(tiny_model):
    config = ArithmeticConfig(tokenizer_name=str(tiny_model), use_wandb=False, seed=3)
    server = Arithmetic.config_init()[1][0].model_copy(update={"model_name": str(tiny_model), "api_key": "x"})
    return Arithmetic(config, [server])


def answer(text, finished=True) -> Answer:
    return Answer(text=text, tokens=len(text), finished=finished)


@pytest.mark.parametrize(
    ("text", "finished", "reward", "correct"),
    [
        ("3 + 4 = 7.", True, 1.0, True),
        ("3 + 4 = 7", False, 0.8, True),
        ("7 is the answer to 3 + 4", True, 0.2, False),
        ("The answer is 8.", True, 0.2, False),
        ("The answer is 8.", False, 0.0, False),
        ("seven", True, 0.0, False),
        ("", True, 0.0, False),
        ("= 7.0", True, 1.0, True),
        ("= 77", True, 0.2, False),
        ("answer: -7", True, 1.0, True),
    ],
)
def test_reward(env, text, finished, reward, correct):
    verdict = env.judge(Sum(3, 4), answer(text, finished))
    assert verdict.reward == pytest.approx(reward)
    assert verdict.correct is correct


def test_held_out_sums_are_never_trained(env):
    assert is_held_out(0, 0)
    assert not is_held_out(1, 0)
    held_out = env.held_out()
    assert len(held_out) == 100
    assert env.held_out() == held_out
    assert all(is_held_out(*s) and 0 <= s.a <= 20 and 0 <= s.b <= 20 for s in held_out)
    drawn = [env.problem(number) for number in range(2000)]
    assert not any(is_held_out(*s) for s in drawn)
    assert {max(s.a for s in drawn), max(s.b for s in drawn), min(s.a for s in drawn)} == {20, 0}


def test_the_evaluation_does_not_depend_on_the_seed_and_0_means_each_held_out_sum_once(tiny_model, env):
    server = Arithmetic.config_init()[1][0].model_copy(update={"model_name": str(tiny_model), "api_key": "x"})
    config = ArithmeticConfig(tokenizer_name=str(tiny_model), use_wandb=False, seed=4)
    other = Arithmetic(config, [server])
    assert other.held_out() == env.held_out()
    whole = Arithmetic(config.model_copy(update={"eval_problems": 0}), [server]).held_out()
    assert len(whole) == len(set(whole)) == 73


def test_a_sum_depends_on_seed_and_number_alone(tiny_model, env):
    server = Arithmetic.config_init()[1][0].model_copy(update={"model_name": str(tiny_model), "api_key": "x"})
    same, other = (
        Arithmetic(ArithmeticConfig(tokenizer_name=str(tiny_model), use_wandb=False, seed=seed), [server])
        for seed in (3, 4)
    )
    numbers = [5, 0, 1 << 40, 2, 5]
    assert [env.problem(n) for n in numbers] == [same.item(n) for n in numbers]
    assert env.problem(0) == Sum(15, 2)  # a resumed run has to find the same sums
    assert [env.problem(n) for n in range(9)] != [other.problem(n) for n in range(9)]
    assert len({env.problem(n) for n in range(9)}) > 5


def test_atropos_own_loop_counts_by_itself(env):
    assert [trio.run(env.get_next_item) for _ in range(3)] == [env.problem(n) for n in range(3)]


def test_messages(env):
    assert env.messages(Sum(3, 4)) == [{"role": "user", "content": "Calculate 3 + 4 and give the final answer."}]
