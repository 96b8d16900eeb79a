from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_actors.environments.epochs import Epochs


@given(size=st.integers(1, 60), seed=st.integers(0, 1 << 32), epoch=st.integers(0, 1 << 40))
def test_each_index_comes_once_an_epoch(size, seed, epoch):
    order = Epochs(size, seed=seed)
    assert sorted(order[number] for number in range(epoch * size, (epoch + 1) * size)) == list(range(size))


@given(numbers=st.lists(st.integers(0, 500)))
def test_processes_with_the_same_seed_agree_whatever_they_were_asked_before(numbers):
    order = Epochs(50, seed=7)
    assert [order[n] for n in numbers] == [Epochs(50, seed=7)[n] for n in numbers]


def test_epochs_and_seeds_differ():
    first = [Epochs(50, seed=1)[n] for n in range(50)]
    assert [Epochs(50, seed=1)[n] for n in range(50, 100)] != first
    assert [Epochs(50, seed=2)[n] for n in range(50)] != first


def test_the_order_is_the_one_that_earlier_processes_had():
    assert [Epochs(5, seed=3)[n] for n in range(10)] == [1, 0, 2, 3, 4, 1, 2, 0, 3, 4]


def test_errors():
    with pytest.raises(ValueError, match=r"size: 0, expected 1 or more"):
        Epochs(0, seed=1)
    with pytest.raises(IndexError, match=r"number: -1, expected 0 or more"):
        Epochs(5, seed=1)[-1]
