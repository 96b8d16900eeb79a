from __future__ import annotations

from lachesis_deploy.records import JsonLines, number, numbers, read_all, read_json


def test_reads_a_growing_file_line_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.read() == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert lines.read() == [{"step": 1}]
    assert lines.read() == []
    with path.open("ab") as file:
        file.write(b'ep": 2}\n\n')
    assert lines.read() == [{"step": 2}]
    assert lines.broken == 0


def test_counts_what_is_no_record_and_goes_on(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "acc\n[1]\n{"kind": "accepted"}\n')
    lines = JsonLines(path)
    assert lines.read() == [{"kind": "accepted"}]
    assert lines.broken == 2


def test_reads_in_pieces_of_bounded_size(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"n": 10}\n' * 5)
    lines = JsonLines(path, max_bytes=16)
    sizes = []
    while new := lines.read():
        sizes.append(len(new))
    assert sum(sizes) == 5
    assert max(sizes) == 2
    assert len(read_all(path)) == 5


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "new"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    lines = JsonLines(path)
    assert len(lines.read()) == 2
    other.write_text('{"step": 1}\n{"step": 20}\n{"step": 21}\n')
    other.replace(path)
    assert [line["step"] for line in lines.read()] == [1, 20, 21]
    path.write_text('{"step": 5}\n')  # shorter than before
    assert lines.read() == [{"step": 5}]
    assert lines.broken == 0


def test_what_is_there_can_be_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    assert JsonLines(path, skip=True).read() == []
    path.write_text('{"n": 1}\n')
    lines = JsonLines(path, skip=True)
    with path.open("a") as file:
        file.write('{"n": 2}\n')
    assert lines.read() == [{"n": 2}]


def test_what_json_does_not_have_is_missing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": NaN, "b": Infinity, "c": 2, "d": true, "e": "3"}\n')
    (record,) = read_all(path)
    assert [number(record, key) for key in "abcdef"] == [None, None, 2, None, None, None]
    assert numbers([record, {"c": 3.5}, {}], "c") == [2, 3.5]


def test_a_json_file_that_is_missing_or_half_written_is_none(tmp_path):
    assert read_json(tmp_path / "queue.json") is None
    (tmp_path / "queue.json").write_text('{"ready": ')
    assert read_json(tmp_path / "queue.json") is None
    (tmp_path / "queue.json").write_text('{"ready": 3}')
    assert read_json(tmp_path / "queue.json") == {"ready": 3}
