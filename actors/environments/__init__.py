"""Atropos environments that come with Lachesis."""

from __future__ import annotations

BUILT_IN = {
    "arithmetic": "lachesis_actors.environments.arithmetic",
    "gsm8k": "lachesis_actors.environments.gsm8k",
}
"""Environments that come with Lachesis, and the modules that hold their classes."""
