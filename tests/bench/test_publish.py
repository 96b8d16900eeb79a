from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lachesis_bench.publish import Case, Model, measure, recorded_bytes
from lachesis_bench.publish_fleet import open_fleet


def test_a_step_moves_the_share_and_the_next_one_moves_it_back() -> None:
    model = Model("1m")
    before = model.bits.copy()
    model.choose(0.01)
    model.step()
    changed = before != model.bits
    assert changed.mean() == pytest.approx(0.01, rel=0.02)
    moves = (model.bits - before)[changed].view(np.int16)
    assert 0.85 < (np.abs(moves) == 1).mean() < 0.95
    model.step()
    np.testing.assert_array_equal(model.bits, before)


@pytest.mark.trio
async def test_every_channel_is_measured_against_its_limit(tmp_path: Path) -> None:
    figures = await measure(tmp_path, "1m", [Case(0.01, "collective", 1), Case(0.01, "stream", 1)], 2)
    assert [figure.figure for figure in figures] == [
        "publish.encode_1m_0.01",
        "publish.transfer_1m_0.01_collective_1",
        "publish.stage_1m_0.01",
        "publish.whole_1m_0.01_collective_1",
        "publish.transfer_1m_0.01_stream_1",
        "publish.whole_1m_0.01_stream_1",
    ]
    for figure in figures:
        assert (figure.unit, figure.runs) == ("ms", 2)
        assert figure.reference is not None
        assert figure.ratio is not None
        assert 0 < figure.ratio < 100
    parts = {figure.figure.split("_")[0]: figure.value for figure in figures[:4]}
    assert parts["publish.whole"] > parts["publish.encode"] + parts["publish.transfer"] - 1


@pytest.mark.trio
async def test_a_member_that_dies_ends_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # no weights
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_fleet(tmp_path, 1):
            pass
    assert "member-0: {'kind': 'ended', 'code': 1}, expected started" in str(caught.value.exceptions[0])


def test_a_real_step_is_hundreds_of_times_smaller_than_the_weights() -> None:
    small, large = recorded_bytes("1e-6"), recorded_bytes("1e-5")
    assert small.figure == "publish.bytes_lr1e-6"
    assert small.value > 200
    assert large.value < small.value / 2
