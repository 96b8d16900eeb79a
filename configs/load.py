"""Loading of a run's configuration: a YAML file, dotted overrides on top, every mistake reported at once.

    >>> load_config("configs/demo.yaml", ["learner.lr=1e-6", "environments.0.workers=4"])

Values are YAML 1.2 scalars: `1e-6` is a number, `yes` and `no` are text, and a key that is given twice is an error.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Hashable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from lachesis_configs.schema import Config


class ConfigError(ValueError):
    """A configuration is wrong. `lines` has one entry a mistake: `key: value 'x', expected ...`."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2's core schema (YAML 1.1 reads 1e-6 as text and 1:30 as 90)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key that is not a word", key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the file `path` with `overrides` applied in order.

    An override is `key=value`: the key is a dotted path into the tree, with numbers for list items
    (`environments.0.workers=4`; the number after the last appends an item), the value is YAML.

    Raises ConfigError with one line for every mistake.
    """
    tree = _read(Path(path))
    lines: list[str] = []
    texts: dict[tuple[str, ...], str] = {}
    for override in overrides:
        try:
            keys, text = _split(override)
            _set(tree, keys, _parse(text, where=".".join(keys)))
            texts[keys] = text
        except ConfigError as error:
            lines += error.lines
    try:
        config = _validate(tree, texts)
    except ValidationError as error:
        raise ConfigError(lines + _explain(error, tree)) from None
    if lines:
        raise ConfigError(lines)
    return config


def dump_config(config: Config) -> str:
    """`config` as YAML with every knob written out; `load_config` reads it back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError([f"{path}: cannot be read ({reason}), expected a YAML file"]) from None
    tree = _parse(text, where=str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: {_shown(tree)}, expected a map of sections ({', '.join(Config.model_fields)})"])
    return tree


def _parse(text: str, *, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError([f"{where}{line}: {error.problem or error.context}, expected valid YAML"]) from None
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError([f"{where}: {str(error).splitlines()[0]}, expected valid YAML"]) from None


def _split(override: str) -> tuple[tuple[str, ...], str]:
    key, equals, text = override.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError([f"override {override!r}: expected key=value with a dotted key, such as learner.lr=1e-6"])
    return keys, text


def _set(tree: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    """Write `value` at `keys`, making what is missing on the way from the schema's defaults."""
    node: Any = tree
    default: Any = Config().model_dump(mode="json")
    for i, key in enumerate(keys):
        where, last = ".".join(keys[: i + 1]), i == len(keys) - 1
        if isinstance(node, dict):
            default = default.get(key) if isinstance(default, dict) else None
            if last:
                node[key] = value
            elif node.get(key) is None:
                # A list exists only as a whole: the default's items are what an index means.
                node[key] = deepcopy(default) if isinstance(default, list) else {}
            node = node[key]
        elif isinstance(node, list):
            if not key.isdecimal() or int(key) > len(node):
                raise ConfigError([f"{where}: no such item, expected a number from 0 to {len(node)}"])
            default = None
            if int(key) == len(node):
                node.append({})
            if last:
                node[int(key)] = value
            node = node[int(key)]
        else:
            raise ConfigError([f"{where}: {'.'.join(keys[:i])} is {_shown(node)}, which has no keys"])


def _validate(tree: dict[str, Any], texts: dict[tuple[str, ...], str]) -> Config:
    """Validate; an override whose YAML value is a number where text is wanted counts as the text that was typed."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        wanted = [tuple(str(k) for k in e["loc"]) for e in error.errors() if e["type"] == "string_type"]
        again = [keys for keys in wanted if keys in texts]
        if not again:
            raise
        for keys in again:
            _set(tree, keys, texts[keys])
        return Config.model_validate(tree)


_EXPECTED = {
    "string_type": "text (in quotes where it looks like a number or true, false, null)",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "a map",
    "tuple_type": "a list",
    "model_type": "a map of keys",
    "model_attributes_type": "a map of keys",
    "int_from_float": "a whole number",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
}

_PATTERNS = {
    r"^tcp://[^:/]+:[0-9]{1,5}$": "tcp://HOST:PORT",
    r"^[^:/]+:[0-9]{1,5}$": "HOST:PORT",
    r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$": "1 to 64 letters, digits, dots, dashes and underscores",
}


def _explain(error: ValidationError, tree: Any) -> list[str]:
    """One line a wrong key: path, value, what was expected and, for a near miss, what was probably meant."""
    found: dict[str, tuple[str, list[str]]] = {}
    for e in error.errors():
        path, value = _walk(tree, e["loc"])
        key = ".".join(path)
        if e["type"] == "extra_forbidden":
            hint = _meant(path)
            found[key] = (f"{key}: unknown key, value {_shown(value)}, {hint}", [])
            continue
        if e["type"] == "value_error":
            # The schema's own checks write the whole line: of a key by itself, or with the key relative to the section.
            text = str(e["ctx"]["error"])
            found[f"{key} {text}"] = (f"{key}{': ' if text.startswith('value') else '.' * bool(key)}{text}", [])
            continue
        _, expected = found.setdefault(key, (f"{key or 'configuration'}: value {_shown(value)}, expected ", []))
        expected.append(_wanted(e, value))
    return [line + " or ".join(dict.fromkeys(expected)) for line, expected in found.values()]


def _meant(path: list[str]) -> str:
    """A hint for the unknown key at `path`: a key of its section, or of a section inside, with a name like it."""
    section = _section_at(path[:-1])
    dotted = {name.rpartition(".")[2]: name for name in reversed(list(_names(section)))}
    near = difflib.get_close_matches(path[-1], dotted, n=1, cutoff=0.6)
    return (
        f"did you mean {'.'.join([*path[:-1], dotted[near[0]]])}?"
        if near
        else f"expected one of {', '.join(section.model_fields)}"
    )


def _wanted(e: Any, value: Any) -> str:
    context = e.get("ctx", {})
    if e["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"text that matches {context['pattern']}")
    if e["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
        return f"one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
    if e["type"] in _EXPECTED:
        return _EXPECTED[e["type"]].format(**context)
    return str(e["msg"]).removeprefix("Input should be ")


def _walk(tree: Any, location: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """The part of a pydantic location that exists in the tree (the rest names union members), and the value there."""
    path: list[str] = []
    for key in location:
        items = dict(enumerate(tree)) if isinstance(tree, (list, tuple)) else tree
        if not isinstance(items, dict) or key not in items:
            break
        tree = items[key]
        path.append(str(key))
    return path, tree


def _names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted keys below `section`, its own first."""
    yield from (prefix + name for name in section.model_fields)
    for name, field in section.model_fields.items():
        if inner := _section(field.annotation):
            yield from _names(inner, f"{prefix}{name}.")


def _section_at(path: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for key in path:
        if key in section.model_fields:
            section = _section(section.model_fields[key].annotation) or section
    return section


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section in a field's annotation: itself, the item of its list or a member of its union."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next(filter(None, map(_section, typing.get_args(annotation))), None)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
