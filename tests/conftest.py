"""Fixtures that tests of all folders share."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tiny import TinyServer, make_tiny_model, serve_tiny

from lachesis_actors.engine import Engine, attach_engine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--versions", type=int, default=100, help="versions of the test that publishes many in a row")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama with tokenizer and chat template, in Hugging Face format."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """A vLLM server of the tiny model, one for the whole session (it takes half a minute to start)."""
    with serve_tiny(tiny_model, tmp_path_factory.mktemp("tiny_engine")) as server:
        yield server


@pytest.fixture
async def engine(tiny_engine: TinyServer) -> AsyncIterator[Engine]:
    """An Engine attached to the shared server, labelled with version 0, for one test marked trio."""
    async with attach_engine(tiny_engine.url) as engine:
        await engine.label(0)
        yield engine
