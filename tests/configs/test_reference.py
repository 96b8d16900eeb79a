from __future__ import annotations

from pathlib import Path

from lachesis_configs.reference import reference
from lachesis_configs.schema import Config


def test_docs_match_the_schema():
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == reference(), "run: python -m lachesis_configs.reference > docs/configuration.md"


def test_every_knob_has_a_docstring_and_a_row():
    page = reference()

    def walk(value, prefix):
        for name, field in type(value).model_fields.items():
            assert field.description, f"{prefix}{name} has no docstring"
            inner = getattr(value, name)
            many = isinstance(inner, list) and inner and hasattr(inner[0], "model_fields")
            inner = inner[0] if many else inner
            if hasattr(inner, "model_fields"):
                walk(inner, f"{prefix}{name}.{'N.' if many else ''}")
            else:
                assert f"| `{prefix}{name}` |" in page

    walk(Config(), "")
    assert "| `learner.lr` | number ≥ 0 | `1e-06` | Learning rate of AdamW, constant after the warm-up. |" in page
