"""A tiny model, and servers of it for each module of tests."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.builders.forced_text import HERMES_TEMPLATE, Force, force_text
from tests.builders.plain_answers import PlainAnswers
from tests.builders.serving import RunningServer, running_server, speaking_model, tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer: what servers do with answers has nothing to do with the number."""
    return speaking_model(tmp_path_factory.mktemp("speaking"), num_layers=1)


@pytest.fixture(scope="session")
def plain(folder: Path) -> PlainAnswers:
    return PlainAnswers(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(lambda: tiny(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def agents(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose model has tools and reasoning in its chat template."""
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(HERMES_TEMPLATE)
    with running_server(lambda: tiny(folder, chat_template=template)) as running:
        yield running


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    return partial(force_text, monkeypatch)
