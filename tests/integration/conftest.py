"""A tiny model that speaks, which servers of many files serve."""

import pytest

from tests.builders.serving import speaking_model


@pytest.fixture(scope="session")
def speaking(tmp_path_factory):
    return speaking_model(tmp_path_factory.mktemp("model") / "speaking")
