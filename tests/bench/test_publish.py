from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lachesis_bench.publish import Case, Model, fitting, measure, memory, trained_bytes
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
        "publish.diff_1m_0.01",
        "publish.encode_1m_0.01",
        "publish.transfer_1m_0.01_collective_1",
        "publish.decode_1m_0.01",
        "publish.verify_1m_0.01",
        "publish.activate_1m_0.01",
        "publish.whole_1m_0.01_collective_1",
        "publish.transfer_1m_0.01_stream_1",
        "publish.whole_1m_0.01_stream_1",
    ]
    for figure in figures:
        assert (figure.unit, figure.runs) == ("ms", 2)
        if figure.ratio is not None:
            assert figure.reference is not None
            assert 0 < figure.ratio < 100
    value = {figure.figure.split("_")[0]: figure.value for figure in figures[:7]}
    parts = ("diff", "encode", "transfer", "decode", "verify", "activate")
    assert value["publish.whole"] == pytest.approx(sum(value[f"publish.{part}"] for part in parts), rel=0.01)
    assert [f.figure.split("_")[0] for f in figures[:7] if f.reference is None] == ["publish.encode", "publish.verify"]


def test_what_does_not_fit_into_memory_is_left_out_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case(0.01, "collective", 2), Case(0.01, "stream", 8)]
    assert fitting("500m", cases, free=memory("500m", 8)) == cases
    assert capsys.readouterr().err == ""
    assert fitting("500m", cases, free=memory("500m", 8) - 1) == cases[:1]
    assert "500m, stream, 8 members: left out, needs" in capsys.readouterr().err


@pytest.mark.trio
async def test_a_member_that_dies_ends_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # no weights
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_fleet(tmp_path, 1):
            pass
    assert "member-0: {'kind': 'ended', 'code': 1}, expected started" in str(caught.value.exceptions[0])


@pytest.mark.slow
@pytest.mark.timeout(400)  # 40 s on two idle cores
def test_real_steps_are_hundreds_of_times_smaller_than_the_weights() -> None:
    size, unchanged = trained_bytes("1e-6", 2)
    assert size.figure == "publish.bytes_lr1e-6"
    assert size.value > 300
    assert (unchanged.figure, unchanged.value) == ("publish.unchanged_lr1e-6", 0)
