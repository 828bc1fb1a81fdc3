"""SIGTERM while a server's process answers."""

from pathlib import Path

import pytest

from benchmarks.serving.server import server
from benchmarks.serving.shutdown import GRACE_SECONDS, LIMIT_SECONDS, at_once, gracefully
from tests.builders.serving import speaking_model

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("model") / "speaking")


def test_sigterm__without_grace_ends_at_once_and_tells_every_client(model: Path) -> None:
    with server({"model.id": model, "grace": 0}) as started:
        found = at_once(started, requests=12, tokens=2000)
    assert found["exit_code"] == 0
    assert found["children_left"] == 0
    assert found["clients"] == {"503": 12}
    # A bound of the design (vLLM's test_shutdown), not a speed: two seconds are the engine's.
    assert found["seconds"] < LIMIT_SECONDS


def test_sigterm__with_grace_completes_what_was_accepted_and_takes_nothing_new(
    model: Path,
) -> None:
    with server({"model.id": model, "grace": GRACE_SECONDS}) as started:
        found = gracefully(started, requests=12, tokens=60)
    assert found["exit_code"] == 0
    assert found["children_left"] == 0
    assert found["completed"] == found["accepted"] == 12
    assert found["late_answers"].get("503", 0) > 0
    assert found["late_accepted"] == 0
