"""What several tests of training share."""

import pytest

from collect.traces import Trace
from tests.builders.traces import make_trace


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Forty requests of ten tokens through four layers of eight experts; nobody changes it."""
    return make_trace(tmp_path_factory.mktemp("trace") / "t")
