"""A tiny model that speaks, which servers of many files serve."""

from pathlib import Path

import pytest

from tests.builders.serving import speaking_model


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("model") / "speaking")
