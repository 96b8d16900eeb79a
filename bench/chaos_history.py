"""What happened in a run whose processes were killed, from the files that they left, and whether promises were kept.

Every program of such a run notes what it is about to do, or was told, in a file of its own, one line an event, one
write a line: what a killed process wrote stays. `read_history` collects the files, `judge` says what should not be.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lachesis_transport.messages import pack, unpack
from lachesis_transport.queue_files import EVENTS

LEARNER_JOURNAL = "learner.jsonl"
CHECKPOINTS = "checkpoints"
NO_VARIANCE = "no_variance"
"""The one reason with which the actors void a ticket whose scores count: its item is done."""


class Journal:
    """Appends lines to a file that outlive the process, not the machine."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if os.fstat(self._file).st_size:
            os.write(self._file, b"\n")  # the process before may have been killed within a line

    def note(self, **fields: Any) -> None:
        """Add one line."""
        os.write(self._file, json.dumps(fields).encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, in order; a torn one is as good as never written."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict):
            yield fields


@dataclass(frozen=True, slots=True)
class Trained:
    """A group that is part of the learner's weights."""

    group: str
    content: str
    """Hash of what the learner received."""
    batch: int
    """The version that it trained."""
    versions: tuple[int, ...]
    """The versions that sampled its trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The learner's state: instead of weights, the groups that made them."""

    version: int
    parent: int | None
    step: int
    queue: str
    """Id of the queue whose versions these are."""
    trained: list[Trained]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint durably, whole or not at all; the two newest stay."""
    (folder / CHECKPOINTS).mkdir(exist_ok=True)
    path = folder / CHECKPOINTS / f"{checkpoint.version:08d}"
    new = path.with_suffix(".new")
    message = {name: getattr(checkpoint, name) for name in ("version", "parent", "step", "queue")}
    message["trained"] = [[t.group, t.content, t.batch, list(t.versions)] for t in checkpoint.trained]
    with new.open("wb") as file:
        file.write(pack(message))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    for old in _checkpoints(folder)[:-2]:
        old.unlink()


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint."""
    paths = _checkpoints(folder)
    if not paths:
        return None
    fields = unpack(paths[-1].read_bytes())
    rows = fields.pop("trained")
    return Checkpoint(trained=[Trained(g, c, b, tuple(v)) for g, c, b, v in rows], **fields)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / CHECKPOINTS).glob("*") if not p.suffix)


@dataclass(slots=True, kw_only=True)
class History:
    """What the files of a run say."""

    sent: dict[str, str] = field(default_factory=dict)
    """Groups that an actor was about to put, by id: hash of the content."""
    answers: list[tuple[str, str]] = field(default_factory=list)
    """What an actor was told about a group: (id, status), in its order."""
    items: dict[int, int] = field(default_factory=dict)
    """What the actors were told about tickets: the number of the prompt."""
    parents: dict[int, int | None] = field(default_factory=dict)
    """Versions and what they were trained from, as the learner was told."""
    batches: list[Trained] = field(default_factory=list)
    """Every group that was trained at some time, those of abandoned branches too."""
    final: list[Trained] = field(default_factory=list)
    """The groups in the last checkpoint: the history that survived."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The queue's own events, in order."""

    @property
    def learners(self) -> int:
        """Incarnations of the learner that the queue welcomed."""
        return len({e["incarnation"] for e in self.events if e["kind"] == "joined" and e["role"] == "learner"})


def read_history(folder: Path) -> History:
    """Collect the files of a run."""
    history = History()
    for path in sorted(folder.glob("actor-*.jsonl")):
        for line in read_lines(path):
            if "sent" in line:
                history.sent[line["sent"]] = line["content"]
            elif "answer" in line:
                history.answers.append((line["group"], line["answer"]))
            elif line.get("item") is not None:
                history.items[line["ticket"]] = line["item"]
    for line in read_lines(folder / LEARNER_JOURNAL):
        if "reserved" in line:
            history.parents[line["reserved"]] = line["parent"]
        else:
            history.batches += [Trained(g, c, line["batch"], tuple(v)) for g, c, v in line["groups"]]
    checkpoint = newest_checkpoint(folder)
    history.final = checkpoint.trained if checkpoint else []
    history.events = [e for e in read_lines(folder / EVENTS) if e.get("source") == "queue"]
    return history


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a history shows. All but the first two and `items_done` should be empty."""

    acknowledged: set[str]
    """Groups that an actor was told the queue has."""
    dropped: set[str]
    """Acknowledged groups that the queue gave up, with a reason."""
    items_done: int | None
    """Prompts trained or scored; None when the queue does not number them."""
    lost: list[str]
    """Acknowledged groups that were neither trained nor dropped nor left over at the end."""
    duplicated: list[str]
    """Groups whose effect is twice in the weights, under one id or two, or that were trained and dropped."""
    violations: list[str]
    """Groups with a token that was too old when they were trained, on whatever branch."""
    foreign: list[str]
    """Groups that were trained with another content than an actor sent."""
    wrong_answers: list[str]
    """Acknowledged groups that were not known when they were put again."""
    items_skipped: list[int]
    """Prompts that were passed over."""
    items_doubled: list[int]
    """Prompts that were used more than once."""

    @property
    def broken(self) -> dict[str, list[Any]]:
        """Everything that should not have been, by name."""
        names = ("lost", "duplicated", "violations", "foreign", "wrong_answers", "items_skipped", "items_doubled")
        return {name: found for name in names if (found := getattr(self, name))}


def judge(history: History, *, staleness_max: int) -> Verdict:
    """What should not have been in a finished run whose bound on staleness was `staleness_max`."""
    acknowledged = {group for group, status in history.answers if status in ("accepted", "duplicate")}
    trained = Counter(t.group for t in history.final)
    contents = Counter(t.content for t in history.final)
    dropped = {e["group"] for e in history.events if e["kind"] == "dropped"}
    left = {e["group"] for e in history.events if e["kind"] == "left"}
    twice = {t.group for t in history.final if trained[t.group] > 1 or contents[t.content] > 1}
    done, skipped, doubled = _judge_items(history)
    return Verdict(
        acknowledged=acknowledged,
        dropped=acknowledged & dropped,
        items_done=done,
        lost=sorted(acknowledged - trained.keys() - dropped - left),
        duplicated=sorted(twice | (trained.keys() & (dropped | left))),
        violations=sorted({t.group for t in history.batches if _age(t, history.parents) > staleness_max}),
        foreign=sorted({t.group for t in history.batches if history.sent.get(t.group) != t.content}),
        wrong_answers=_wrong_answers(history, dropped),
        items_skipped=skipped,
        items_doubled=doubled,
    )


def _age(trained: Trained, parents: dict[int, int | None]) -> float:
    """Staleness in the tree of versions; infinite between versions without a common ancestor, or unknown ones."""

    def ancestors(version: int) -> dict[int, int]:
        found: dict[int, int] = {}
        at: int | None = version
        while at is not None and at in parents:
            found[at] = len(found)
            at = parents[at]
        return found

    up = ancestors(trained.batch)
    return max(
        min((up[v] + edges for v, edges in ancestors(sampled).items() if v in up), default=float("inf"))
        for sampled in trained.versions
    )


def _wrong_answers(history: History, dropped: set[str]) -> list[str]:
    known: set[str] = set()
    wrong = set()
    for group, status in history.answers:
        # What is dropped is answered `stale` for ever.
        if group in known and status != "duplicate" and not (status == "stale" and group in dropped):
            wrong.add(group)
        if status in ("accepted", "duplicate"):
            known.add(group)
    return sorted(wrong)


def _judge_items(history: History) -> tuple[int | None, list[int], list[int]]:
    """How many prompts are done; those that were passed over, and those that were used more than once.

    A prompt whose ticket came to nothing belongs to the next ticket: while there is such a prompt, no new one is begun.
    One that came to nothing too often is given up by the queue, which says so.
    """
    of_ticket: dict[int, int] = {}
    free: set[int] = set()
    given_up: set[int] = set()
    scored: Counter[int] = Counter()
    skipped: set[int] = set()
    doubled: set[int] = set()
    begun = 0
    for event in history.events:
        kind = event["kind"]
        if kind == "issued" and "item" in event:
            item = of_ticket[event["ticket"]] = event["item"]
            if item in free:
                free.remove(item)
            elif item < begun:
                doubled.add(item)
            else:
                skipped |= free | set(range(begun, item))
                begun = item + 1
        elif kind == "voided" and event["ticket"] in of_ticket:
            if event["reason"] == NO_VARIANCE:
                scored[of_ticket[event["ticket"]]] += 1
            else:
                free.add(of_ticket[event["ticket"]])
        elif kind in ("dropped", "left") and (ticket := int(event["group"].partition(":")[0])) in of_ticket:
            free.add(of_ticket[ticket])
        elif kind == "skipped":
            given_up.add(event["item"])
        free -= given_up
    if not of_ticket:
        return None, [], []
    doubled |= {item for ticket, item in history.items.items() if of_ticket.get(ticket) != item}
    used = scored + Counter(of_ticket[int(t.group.partition(":")[0])] for t in history.final)
    doubled |= {item for item, times in used.items() if times > 1}
    skipped |= set(range(max(used, default=-1) + 1)) - used.keys() - free - given_up
    return len(used), sorted(skipped), sorted(doubled)
