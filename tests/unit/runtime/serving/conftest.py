"""A tiny model, and one server of it for each module of tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.serving import RunningServer, running_server, speaking_model, tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(lambda: tiny(folder)) as running:
        yield running
