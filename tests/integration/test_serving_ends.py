"""SIGTERM while a server is generating."""

from pathlib import Path

import pytest

from benchmarks.serving.server import run_server
from benchmarks.serving.shutdown import GRACE_SECONDS, stop_abruptly, stop_gracefully
from tests.builders.serving import speaking_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("model") / "speaking")


def test_sigterm__without_grace_ends_at_once(model: Path) -> None:
    with run_server({"model.id": model, "grace": 0}) as started:
        report = stop_abruptly(started, requests=12, tokens=2000)
    assert report.exit_code == 0
    assert report.children_left == 0
    assert report.clients == {"503": 12}


def test_sigterm__with_grace_finishes_accepted_requests(
    model: Path,
) -> None:
    with run_server({"model.id": model, "grace": GRACE_SECONDS}) as started:
        report = stop_gracefully(started, requests=12, tokens=60)
    assert report.exit_code == 0
    assert report.children_left == 0
    assert report.completed == report.accepted == 12
    assert report.late_answers.get("503", 0) > 0
    assert report.late_accepted == 0
