"""docs/configuration.md, made from the schema: `python -m lachesis_configs.reference > docs/configuration.md`."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from lachesis_configs.schema import Config

HEAD = """\
# Configuration

<!-- Made by `python -m lachesis_configs.reference > docs/configuration.md`: edit configs/schema.py instead. -->

A run is described by one YAML file; every knob has a default, so a file holds only what differs. Any knob can be set on
the command line too, after the file, as `key=value`:

    lachesis launch configs/demo.yaml learner.lr=1e-5 staleness.max=4 environments.0.options.max_value=9

Keys are dotted paths and list items have numbers (the number after the last item appends one). Values are YAML 1.2:
`1e-6` is a number, `yes` is text, a whole number is fine where a number is wanted, and text that looks like a number
needs quotes in a file. Relative paths start from the folder in which the command runs. Unknown keys and wrong values
are errors, all reported at once, a line each, and once there is none of them, knobs that contradict each other:

    staleness.max: value 'two', expected a whole number
    learner.clip_hi: unknown key, value 3, did you mean correction.clip_high?

`lachesis validate FILE [key=value ...]` checks a configuration and starts nothing. Every run writes the whole of its
own to `config.yaml` in its folder.
"""


def reference() -> str:
    """The page: a table a section, a row a knob with its type, default and docstring."""
    return HEAD + "".join(_section(Config, ""))


def _section(section: type[BaseModel], prefix: str) -> Iterator[str]:
    schema = section.model_json_schema()
    rows = []
    inner: list[tuple[type[BaseModel], str]] = []
    for name, field in section.model_fields.items():
        model, many = _model(field.annotation)
        if model is not None:
            inner.append((model, f"{prefix}{name}.{'N.' if many else ''}"))
            continue
        default = field.get_default(call_default_factory=True)
        kind = _kind(schema["properties"][name])
        rows.append(f"| `{prefix}{name}` | {kind} | `{_yaml(default)}` | {_line(field.description)} |\n")
    if rows:
        yield f"\n## {prefix.removesuffix('.') or 'run'}\n\n{_line(section.__doc__)}\n\n"
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
        yield from rows
    for model, path in inner:
        yield from _section(model, path)


def _model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field holds, if it does, and whether it holds a list of them."""
    if typing.get_origin(annotation) is list:
        return _model(typing.get_args(annotation)[0])[0], True
    return (annotation, False) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else (None, False)


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{v}`" for v in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_kind(s) for s in schema["anyOf"])
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "null": "null",
    }
    kind = schema.get("type", "anything")
    if kind == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list of {_kind(items)}"
    if kind == "object":
        return "map"
    if str(schema.get("pattern", "")).startswith("^tcp"):
        return "tcp://HOST:PORT"
    if str(schema.get("pattern", "")).endswith(":[0-9]{1,5}$"):
        return "HOST:PORT"
    bounds = (("exclusiveMinimum", "> "), ("minimum", "≥ "), ("exclusiveMaximum", "< "), ("maximum", "≤ "))
    limits = [f"{sign}{schema[key]:g}" for key, sign in bounds if key in schema]
    return " ".join([words.get(kind, kind), ", ".join(limits)]).strip()


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
