"""What of a vLLM log tells why the engine ended.

vLLM's processes each write the traceback of one failure again, some hundred lines, and the last of them says to look
above. Here each error stands once, the first one first.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

SCANNED_BYTES = 1 << 20
"""What is read of the end of a log."""
CAUSES = 12
"""Lines of errors that are shown, the last ones: a long run may have met others before."""
LAST = 10
"""Last lines that are shown where no line is an error's."""

_PREFIX = re.compile(r"^(?:\([^()]* pid=\d+\) ?)?(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b")
_FRAME = re.compile(r'^\s*(?:File "|[\^~]+\s*$)')


def cause(path: Path, *, since: int = 0) -> str:
    """The errors in a log, from byte `since` on, each once and without the frames of its traceback; the last lines
    where there are none, and "(nothing)" for an empty or missing log."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - SCANNED_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        lines = []
    return "\n".join(_errors(lines)[-CAUSES:] or lines[-LAST:]) or "(nothing)"


def _errors(lines: list[str]) -> list[str]:
    found: dict[str, None] = {}
    inside = False
    """The line before belongs to an exception's text."""
    for line in lines:
        prefix = _PREFIX.match(line)
        assert prefix is not None  # it matches nothing, too
        text = line[prefix.end() :].rstrip()
        indented = text[:1].isspace()
        exception = _EXCEPTION.match(text) is not None
        said = prefix["level"] in ("ERROR", "CRITICAL") and not indented and not text.startswith("Traceback ")
        inside = bool(text) and (exception or (inside and indented and not _FRAME.match(text)))
        if text and (inside or said):
            found[text] = None
    return list(found)
