from __future__ import annotations

import numpy as np
import pytest

from lachesis_actors.provenance import Provenance, ProvenanceError, Record

EOS = 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def mask(text: str) -> np.ndarray:
    return np.array([int(c) for c in text], dtype=np.uint8)


def record(prompt, output, *, logprob=-0.5, version=3, finish="stop") -> Record:
    n = len(output)
    return Record(
        prompt_ids=ids(*prompt),
        output_ids=ids(*output),
        logprobs=np.array([logprob - i for i in range(n)], dtype=np.float32),
        versions=np.full(n, version, dtype=np.int32),
        finish_reason=finish,
    )


def held(*records: Record, ticket: int | None = 7) -> Provenance:
    provenance = Provenance()
    provenance.add(ticket, records, now=0.0)
    return provenance


def test_whole_answers_keep_their_logprobs_and_versions():
    provenance = held(record([10, 11], [20, 21, EOS]), record([10, 11], [30, EOS], logprob=-2.0, version=4))
    a, b = provenance.match(7, [ids(10, 11, 20, 21, EOS), ids(10, 11, 30, EOS)], [mask("00111"), mask("0011")])
    assert a.logprobs.tolist() == [0, 0, -0.5, -1.5, -2.5]
    assert a.versions.tolist() == [-1, -1, 3, 3, 3]
    assert b.logprobs.tolist() == [0, 0, -2, -3]
    assert b.versions.tolist() == [-1, -1, 4, 4]
    assert a.finished
    assert b.finished
    assert provenance.statistics().records == 0
    assert provenance.statistics().nbytes == 0


def test_identical_answers_are_each_used_once():
    provenance = held(record([10], [20, EOS], logprob=-1.0), record([10], [20, EOS], logprob=-1.25))
    tokens = ids(10, 20, EOS)
    a, b = provenance.match(7, [tokens, tokens], [mask("011"), mask("011")])
    assert {float(a.logprobs[1]), float(b.logprobs[1])} == {-1.0, -1.25}


def test_a_record_serves_one_sequence_only():
    provenance = held(record([10], [20, EOS]))
    tokens = ids(10, 20, EOS)
    with pytest.raises(ProvenanceError, match="sequence 1, position 1: all 1 answers to this prompt belong to other"):
        provenance.match(7, [tokens, tokens], [mask("011"), mask("011")])
    # a refused group consumes nothing
    assert provenance.statistics().records == 1
    provenance.match(7, [tokens], [mask("011")])
    with pytest.raises(ProvenanceError):
        provenance.match(7, [tokens], [mask("011")])


def test_the_templates_tail_loses_its_mask():
    """tokenize_for_trainer counts the newline behind the end token to the turn, though nobody sampled it."""
    (a,) = held(record([10], [20, EOS])).match(7, [ids(10, 20, EOS, 99)], [mask("0111")])
    assert a.mask.tolist() == [0, 1, 1, 0]
    assert a.versions.tolist() == [-1, 3, 3, -1]


def test_a_cut_answer_closed_by_the_template():
    (a,) = held(record([10], [20, 21], finish="length")).match(7, [ids(10, 20, 21, EOS, 99)], [mask("01111")])
    assert a.mask.tolist() == [0, 1, 1, 0, 0]
    assert not a.finished


def test_a_longer_tail_is_a_mismatch():
    with pytest.raises(ProvenanceError, match="position 3"):
        held(record([10], [20, EOS])).match(7, [ids(10, 20, EOS, 5, 5, 5, 5, 5)], [mask("01111111")])


def test_the_end_token_may_be_missing():
    (a,) = held(record([10], [20, 21, EOS])).match(7, [ids(10, 20, 21)], [mask("011")])
    assert a.logprobs.tolist() == [0, -0.5, -1.5]
    with pytest.raises(ProvenanceError):  # but nothing else may
        held(record([10], [20, 21, 22], finish="length")).match(7, [ids(10, 20, 21)], [mask("011")])
    with pytest.raises(ProvenanceError):
        held(record([10], [20, 21, EOS])).match(7, [ids(10, 20)], [mask("01")])


def test_the_longest_answer_wins():
    provenance = held(record([10], [20, 21]), record([10], [20, 21, 22, EOS], logprob=-3.0))
    (a,) = provenance.match(7, [ids(10, 20, 21, 22, EOS)], [mask("01111")])
    assert a.logprobs.tolist() == [0, -3, -4, -5, -6]
    assert provenance.statistics().records == 1


def test_several_turns():
    first = record([10], [20, EOS], version=3)
    second = record([10, 20, EOS, 40, 41], [50, EOS], version=5, finish="length")
    (a,) = held(first, second).match(7, [ids(10, 20, EOS, 40, 41, 50, EOS)], [mask("0110011")])
    assert a.versions.tolist() == [-1, 3, 3, -1, -1, 5, 5]
    assert not a.finished


def test_an_answer_that_was_continued_directly():
    first = record([10], [20, 21], version=3, finish="length")
    second = record([10, 20, 21], [22, EOS], version=4)
    (a,) = held(first, second).match(7, [ids(10, 20, 21, 22, EOS)], [mask("01111")])
    assert a.versions.tolist() == [-1, 3, 3, 4, 4]
    assert a.finished


def test_only_the_last_turn_trained():
    first = record([10], [20, EOS])
    second = record([10, 20, EOS, 40], [50, EOS])
    (a,) = held(first, second).match(7, [ids(10, 20, EOS, 40, 50, EOS)], [mask("000011")])
    assert a.mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_mismatch_names_sequence_and_position():
    provenance = held(record([10], [20, 21, 22, 23, 24, EOS]))
    with pytest.raises(ProvenanceError, match=r"sequence 0, position 3: differs .* \(2 of 6 trained tokens agree"):
        provenance.match(7, [ids(10, 20, 21, 77, 23, 24, EOS)], [mask("0111111")])
    with pytest.raises(ProvenanceError, match=r"position 1: no answer on record has the 1 tokens before it"):
        provenance.match(7, [ids(11, 20, 21)], [mask("011")])


def test_retokenised_text_is_refused():
    """The same text in other ids: '2021' as one token instead of two."""
    with pytest.raises(ProvenanceError):
        held(record([10], [20, 21, EOS])).match(7, [ids(10, 2021, EOS)], [mask("011")])


def test_tickets_do_not_share_records():
    provenance = held(record([10], [20, EOS]), ticket=7)
    with pytest.raises(ProvenanceError, match="ticket 8: no answers"):
        provenance.match(8, [ids(10, 20, EOS)], [mask("011")])
    provenance.close(7)
    with pytest.raises(ProvenanceError, match="ticket 7: no answers"):
        provenance.match(7, [ids(10, 20, EOS)], [mask("011")])
    assert provenance.statistics().nbytes == 0


def test_the_byte_budget_gives_up_records_without_a_ticket_first_then_the_oldest():
    one = record([10], [20, EOS])
    provenance = Provenance(max_bytes=2 * one.nbytes)
    provenance.add(1, [one], now=0.0)
    provenance.add(None, [record([10], [20, EOS])], now=1.0)
    provenance.add(2, [record([10], [20, EOS])], now=2.0)
    assert provenance.statistics().tickets == 2
    with pytest.raises(ProvenanceError, match="ticket None"):
        provenance.match(None, [ids(10, 20, EOS)], [mask("011")])
    provenance.add(3, [record([10], [20, EOS])], now=3.0)
    with pytest.raises(ProvenanceError, match=r"ticket 1: .*'bytes': 2"):
        provenance.match(1, [ids(10, 20, EOS)], [mask("011")])
    provenance.match(3, [ids(10, 20, EOS)], [mask("011")])
    assert provenance.statistics().nbytes <= 2 * one.nbytes


def test_old_tickets_are_given_up():
    provenance = Provenance(max_age_seconds=100)
    provenance.add(1, [record([10], [20, EOS])], now=0.0)
    provenance.add(2, [record([10], [20, EOS])], now=101.0)
    assert provenance.statistics().evicted == {"age": 1}
    assert provenance.statistics().tickets == 1
