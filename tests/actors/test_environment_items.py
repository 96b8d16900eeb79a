from __future__ import annotations

import logging

import pytest

from lachesis_actors.environment_items import EnvironmentItems


class Stock:
    """What a BaseEnv has that matters here."""

    def __init__(self, **attributes) -> None:
        self.backlog = []
        self.calls = 0
        vars(self).update(attributes)

    async def get_next_item(self):
        self.calls += 1
        return "next"


class Counting(Stock):
    async def get_next_item(self):
        item = "abc"[self.iter % 3]
        self.iter += 1
        return item


class Naming(Counting):
    def item(self, number):
        return f"item {number}"


class NamingLater(Naming):
    async def item(self, number):
        return None if number == 3 else super().item(number)


@pytest.mark.trio
async def test_an_environment_that_names_its_items_is_asked_by_number(caplog):
    for env in (Naming(iter=0), NamingLater(iter=0)):
        items = EnvironmentItems(env)
        assert [await items.get(number) for number in (7, 0, 7)] == ["item 7", "item 0", "item 7"]
        assert env.iter == 0
    assert await items.get(3) is None
    assert caplog.records == []


@pytest.mark.trio
async def test_the_counter_of_a_stock_environment_is_set(caplog):
    env = Counting(iter=0)
    items = EnvironmentItems(env)
    assert [await items.get(number) for number in (4, 0, 0, 5)] == ["b", "a", "a", "c"]
    assert env.iter == 6
    assert caplog.records == []


@pytest.mark.trio
@pytest.mark.parametrize("attributes", [{}, {"iter": True}, {"iter": None}, {"iter": "abc"}, {"item": "a thing"}])
async def test_others_give_what_comes_and_the_log_says_so(attributes, caplog):
    env = Stock(**attributes)
    with caplog.at_level(logging.WARNING):
        items = EnvironmentItems(env)
    assert "Stock has neither item(number) nor a counter iter" in caplog.text
    assert await items.get(5) == "next"
    assert {name: getattr(env, name) for name in attributes} == attributes
    assert env.calls == 1


@pytest.mark.trio
async def test_the_backlog_goes_first(caplog):
    env = Counting(iter=0, backlog=["left", "over"])
    items = EnvironmentItems(env)
    assert [await items.get(number) for number in range(3)] == ["over", "left", "c"]
