"""What a request of the queue's clients means: from wire messages to the state machine, and its answers back.

No sockets: a message and the time go in, a reply comes out. docs/protocols.md lists the operations.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from lachesis_configs.schema import Config
from lachesis_transport.decisions import Fenced, Finished, NameTaken, NotJoined, PutResult, ReplayError, Wait
from lachesis_transport.messages import MAX_TRAJECTORIES, Group, MessageError, Scores, take
from lachesis_transport.presence import Role
from lachesis_transport.rare_log import RareLog
from lachesis_transport.replay import Replay
from lachesis_transport.store import Event, Refused

log = logging.getLogger("lachesis.queue")

MAX_REPORTS = 512
MAX_WORD = 128
"""Characters of a reason, or of an environment's name."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Reply = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A client that said hello."""

    role: Role
    name: str
    incarnation: str


class Requests:
    """The requests of one queue. `queue_id` names its state."""

    def __init__(self, replay: Replay, config: Config, *, queue_id: str) -> None:
        self._replay, self._config, self._queue_id = replay, config, queue_id
        self._process = uuid4().hex
        self._kept: list[int] = []
        self._waiting: Counter[str] = Counter()
        self._refused_reports = RareLog(log)
        self._operations: dict[tuple[str, str], Callable[[Peer, dict[str, Any], float], Reply]] = {
            ("actor", "ticket"): self._ticket,
            ("actor", "void"): self._void,
            ("actor", "put"): self._put,
            ("learner", "reserve"): self._reserve,
            ("learner", "published"): self._published,
            ("learner", "lease"): self._lease,
            ("learner", "trained"): self._trained,
            ("learner", "commit"): self._commit,
            ("learner", "finish"): self._finish,
        }

    def parked(self, peer: Peer, message: dict[str, Any]) -> dict[str, Any] | None:
        """What to keep of a request that the queue may answer later; None for others. Raises MessageError."""
        op = message["op"]
        if op not in ("ticket", "lease") or (peer.role, op) not in self._operations:
            return None
        kept = {"op": op, "id": message["id"], "version": take(message, "version", int)}
        if op == "ticket":
            kept["environment"] = _short(message, "environment")
        return kept

    def begin_round(self, waiting: Counter[str]) -> None:
        """Requests for tickets are tried from now on in the order of their turns; `waiting`: how many, by actor."""
        self._kept = []
        self._waiting = waiting

    def hello(self, message: dict[str, Any], now: float) -> tuple[Peer | None, Reply]:
        """A client introduces itself: who it is from now on, or None, and the answer. Raises MessageError."""
        role, name = take(message, "role", str), take(message, "name", str)
        if role != "actor" and role != "learner":
            raise MessageError(f"role: {role!r}, expected actor or learner")
        incarnation = take(message, "incarnation", str)
        for key, value in (("name", name), ("incarnation", incarnation)):
            if not NAME.fullmatch(value):
                raise MessageError(f"{key}: {value!r}, expected 1 to 64 letters, digits, '_', '.', '-'")
        if name == "queue" or (name == "learner" and role == "actor"):
            raise MessageError(f"name: {name!r}, expected one that is no other role's: the event log goes by it")
        try:
            self._replay.join(role=role, name=name, incarnation=incarnation, now=now)
        except NameTaken as error:
            seconds = self._config.queue.heartbeat_seconds
            told = {"error": str(error), "heartbeat_seconds": seconds, "process": self._process}
            return None, {"ok": False, "code": "name_taken", **told}
        except Fenced as error:
            return None, {"ok": False, "code": "fenced", "error": str(error)}
        return Peer(role, name, incarnation), {
            "ok": True,
            "queue": self._queue_id,
            "run_name": self._config.run.name,
            "batch_groups": self._config.queue.batch_groups,
            "staleness_max": self._config.staleness.max,
            "steps": self._config.run.steps,
            "state": self._replay.state(),
        }

    def alive(self, message: dict[str, Any], now: float) -> None:
        """A client says, over another connection than its requests take, that it is alive: nobody waits for an answer.

        Raises MessageError.
        """
        if take(message, "queue", str) != self._queue_id:
            return
        role, name, incarnation = (take(message, key, str) for key in ("role", "name", "incarnation"))
        if (role == "actor" or role == "learner") and self._replay.is_live(role, name, incarnation):
            self._replay.heard(role=role, name=name, incarnation=incarnation, now=now)

    def decide(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        """The answer to a request of a client that said hello; {"wait": why} while it has to wait, and the batch of a
        lease as {"lease": Lease}. Raises MessageError."""
        op = message["op"]
        try:
            if op in ("heartbeat", "goodbye"):
                return self._heartbeat(peer, message, now)
            operation = self._operations.get((peer.role, op))
            if operation is None:
                raise MessageError(f"op: {op!r}, expected one for role {peer.role!r}")
            return {"ok": True, **operation(peer, message, now)}
        except NotJoined as error:
            return {"ok": False, "code": "hello", "error": str(error)}
        except ReplayError as error:
            return {"ok": False, "code": "refused", "error": str(error)}

    def _heartbeat(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        version = take(message, "version", (int, type(None)))
        reports, number = take(message, "report", list), take(message, "report_number", int)
        self._replay.heard(role=peer.role, name=peer.name, incarnation=peer.incarnation, now=now, version=version)
        events = [
            Event(report["kind"], {key: value for key, value in report.items() if key != "kind"}, source=peer.name)
            for report in reports[:MAX_REPORTS]
            if isinstance(report, dict) and isinstance(report.get("kind"), str)
        ]
        if len(events) < len(reports):
            self._replay.count("reports_refused", len(reports) - len(events))
            self._refused_reports.warning(
                "%s: %d of %d reports are no maps with a kind, or beyond %d",
                peer.name,
                len(reports) - len(events),
                len(reports),
                MAX_REPORTS,
            )
        self._replay.report(role=peer.role, name=peer.name, number=number, events=events)
        if message["op"] == "goodbye":
            self._replay.leave(role=peer.role, name=peer.name)
        return {"ok": True, "state": self._replay.state()}

    def _ticket(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        answer = self._replay.ticket(
            actor=peer.name,
            ask=take(message, "id", int),
            version=take(message, "version", int),
            environment=take(message, "environment", str),
            now=now,
            kept=self._kept,
            waiting=self._waiting[peer.name],
        )
        if isinstance(answer, Wait):
            return {"wait": answer.why}
        if isinstance(answer, Finished):
            return {"finished": True}
        return {
            "ticket": answer.ticket,
            "deadline": answer.deadline,
            "version": answer.version,
            "item": answer.item,
        }

    def _void(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        ticket, reason = take(message, "ticket", (int, type(None))), _short(message, "reason")
        if ticket is None:
            ask = take(message, "ask", int)
            self._replay.cancel(actor=peer.name, ask=ask, now=now)
            return {}
        wire = take(message, "scores", (dict, type(None)))
        scores = None if wire is None else Scores.from_wire(wire)
        if scores is not None and scores.sequences > MAX_TRAJECTORIES:
            raise MessageError(f"scores.sequences: {scores.sequences}, expected at most {MAX_TRAJECTORIES}")
        self._replay.void(actor=peer.name, ticket=ticket, reason=reason, scores=scores, now=now)
        return {}

    def _put(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        content = b""
        try:
            content = take(message, "group", bytes)
            group = Group.unpack(content)
            final = take(message, "final", bool)
        except MessageError as error:
            self._replay.count("frames_refused")
            result = PutResult("invalid", str(error))
        else:
            result = self._replay.put(group, content, actor=peer.name, final=final, now=now)
        if result.status == "invalid":
            self._replay.quarantine(Refused(f"actor {peer.name}", result.reason, content, time.time()))
        return {"status": result.status, "reason": result.reason, "retry_after": result.retry_after}

    def _reserve(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        parent = take(message, "parent", (int, type(None)))
        return {"version": self._replay.reserve(parent=parent, key=f"{peer.incarnation}:{take(message, 'id', int)}")}

    def _published(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        self._replay.published(take(message, "version", int))
        return {}

    def _lease(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        answer = self._replay.lease(version=take(message, "version", int), now=now)
        if isinstance(answer, Wait):
            return {"wait": answer.why}
        return {"lease": answer}

    def _trained(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        self._replay.trained(version=take(message, "version", int))
        return {"checkpoint_wanted": self._replay.checkpoint_wanted}

    def _commit(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        self._replay.commit(version=take(message, "version", int), checkpoint=take(message, "checkpoint", str))
        return {}

    def _finish(self, peer: Peer, message: dict[str, Any], now: float) -> Reply:
        self._replay.finish(version=take(message, "version", int))
        return {}


def _short(message: dict[str, Any], key: str) -> str:
    text = str(take(message, key, str))
    if len(text) > MAX_WORD:
        raise MessageError(f"{key}: {len(text)} characters, expected at most {MAX_WORD}")
    return text
