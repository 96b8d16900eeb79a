"""Lists of CPU cores, as they stand in a configuration: "0", "0-1" or "0,2-3"."""

from __future__ import annotations

import os


def parse_cores(text: str) -> set[int]:
    """The cores that a list names. Raises ValueError for anything else than numbers and ranges of them."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or (dash and int(first) > int(last)):
            raise ValueError("core numbers and ranges such as 0, 0-1 or 0,2-3")
        cores.update(range(int(first), int(last if dash else first) + 1))
    return cores


def usable_cores(key: str, text: str) -> set[int]:
    """The cores that `text`, the value of `key`, names. Raises ConfigError when this process may not use them all."""
    from lachesis_configs.load import ConfigError  # which itself imports the schema, and that parse_cores

    cores, usable = parse_cores(text), os.sched_getaffinity(0)
    if not cores <= usable:
        raise ConfigError([f"{key}: value {text!r}, expected cores of this machine ({sorted(usable)})"])
    return cores
