"""What `lachesis bench activation` counts, without an engine; and its alternatives with vLLM's own packing."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from lachesis_bench.activation import WAYS, _figures, _Measured
from lachesis_bench.activation_alternatives import measure
from lachesis_bench.activation_load import Load


@pytest.mark.trio
async def test_the_last_running_request_counts_and_one_that_has_ended_does_not(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lachesis_bench.activation_load.time.perf_counter", trio.current_time)
    load = Load(4)
    early, late, ends, waits = load.streams
    for stream in (early, late, ends):
        load.came(stream)
    began = trio.current_time()

    async def tokens() -> None:
        await trio.sleep(1)
        load.came(early)
        await trio.sleep(1)
        load.next_request(ends)
        await trio.sleep(1)
        load.came(late)
        await trio.sleep(1)
        load.came(waits)  # its first: it did not run

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tokens)
        assert await load.next_tokens() - began == pytest.approx(3)
        assert await load.tokens(1) == 1
    assert load.count == 6


@pytest.mark.trio
async def test_the_last_token_of_an_answer_counts_for_it(autojump_clock: trio.testing.MockClock) -> None:
    load = Load(1)
    load.came(load.streams[0])

    async def last_token() -> None:
        await trio.sleep(1)
        load.came(load.streams[0])
        load.next_request(load.streams[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(last_token)
        assert await load.next_tokens() == load.streams[0].times[1]


@pytest.mark.trio
async def test_an_engine_that_says_nothing_more_ends_the_wait(autojump_clock: trio.testing.MockClock) -> None:
    load = Load(1)
    load.came(load.streams[0])
    with pytest.raises(trio.TooSlowError):
        await load.next_tokens()
    with pytest.raises(trio.TooSlowError):
        await load.tokens(1)


def test_each_pause_is_compared_with_a_full_reload_over_the_same_span() -> None:
    measured = _Measured(weights_mb=100.0, prepare=[0.5], prepare_tokens=[30], speed=[100.0], memory=[80.0])
    for way, pause, to_tokens in zip(WAYS, (0.5, 0.1, 0.2), (1.5, 0.9, 0.3), strict=True):
        measured.pause[way].append(pause)
        measured.to_tokens[way].append(to_tokens)
    ratios = {figure.figure: figure.ratio for figure in _figures(measured)}
    assert ratios == {
        "publish.pause": pytest.approx(0.2),
        "publish.pause_with_prefill": pytest.approx(0.6),
        "publish.pause_keep": pytest.approx(0.4),
        "publish.pause_keep_with_step": pytest.approx(0.2),
        "publish.prepare": None,
        "publish.prepare_speed": pytest.approx(0.6),
        "publish.prepare_memory": pytest.approx(0.8),
    }


@pytest.mark.slow
def test_the_alternatives_are_timed_with_the_packing_of_vllm() -> None:
    figures = {figure.figure: figure for figure in measure(layers=2, vocabulary=1_024, runs=2)}
    assert figures["publish.repack_layer"].value < figures["publish.repack_all"].value
    assert figures["publish.patch"].value > 0
    for sequences in (1, 8, 16, 32):
        products = figures[f"publish.plain_products_{sequences}"]
        assert products.reference is not None
        assert products.ratio == pytest.approx(products.value / products.reference)
