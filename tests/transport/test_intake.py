from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lachesis_transport.decisions import Grant, ReplayError, Rules
from lachesis_transport.replay import Replay

_spec = importlib.util.spec_from_file_location("groups", Path(__file__).with_name("groups.py"))
groups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(groups)


@pytest.mark.parametrize("end", ["put", "void"])
def test_a_copy_of_a_request_that_comes_after_the_end_of_its_ticket_gets_no_other(end):
    replay = Replay(Rules(batch_groups=2, staleness_max=1, steps=10))
    replay.join(role="actor", name="a", incarnation="1", now=0.0)
    replay.published(replay.reserve(parent=None, key="k"))

    def ask():
        return replay.ticket(actor="a", ask=7, version=0, environment="sums", now=0.0)

    grant = ask()
    assert isinstance(grant, Grant)
    assert ask() == grant
    if end == "put":
        group = groups.group(grant.ticket, [0])
        assert replay.put(group, group.pack(), actor="a", final=True, now=0.0).status == "accepted"
    else:
        replay.void(actor="a", ticket=grant.ticket, reason="failed", scores=None, now=0.0)
    with pytest.raises(ReplayError, match="7 was cancelled"):
        ask()
    assert not replay.tickets
