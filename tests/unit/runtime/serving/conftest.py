"""One server of the reference model for a whole file of tests."""

from collections.abc import Iterator

import pytest

from tests.builders.serving import Running, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running
