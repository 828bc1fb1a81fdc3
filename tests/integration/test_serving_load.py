"""The server under overload, disconnects and fuzzing: `benchmarks/serving` for seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serving.disconnects import LeaveMoment, disconnect_clients, random_departures
from benchmarks.serving.fuzz import NEW_TOKENS, send_cases
from benchmarks.serving.queue import RUNNING, WAITING, measure_full_queue
from benchmarks.serving.server import IDLE_GAUGES, ServerProcess, extend_context, run_server
from benchmarks.serving.storm import send_storm
from tests.builders.serving import speaking_model

NOTHING = dict.fromkeys(IDLE_GAUGES, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("model") / "speaking")


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    longer = extend_context(tmp_path_factory.mktemp("longer") / "model", 16384, model=model)
    with run_server({"model.id": longer, "max_new_tokens": 10_000}) as started:
        yield started


def test_server__answers_the_next_client_after_many_disconnects(running: ServerProcess) -> None:
    report = send_storm(running, requests=40, tokens=10_000)
    assert report.ends == {"timeout": 40}
    assert (report.next_status, report.next_tokens) == (200, 10)
    assert report.left == NOTHING
    # Abandoned generations were cancelled.
    assert report.tokens_generated < report.tokens_asked_for / 10


def test_disconnects__leak_no_slot_thread_or_descriptor(running: ServerProcess) -> None:
    report = disconnect_clients(running, requests=50, tokens=10_000, seed=3)
    assert set(report.left_when) == set(LeaveMoment)
    assert report.left == NOTHING
    assert report.threads_leaked <= 0
    assert report.descriptors_leaked <= 0
    assert report.same_answer_afterwards


def test_departures__are_equal_for_equal_seeds() -> None:
    def made(seed: int) -> list:
        return random_departures(30, seed=seed, tokens=5, prompts=["a", "b"])

    assert made(1) == made(1) != made(2)


def test_full_queue__answers_429_with_retry_after(
    model: Path,
) -> None:
    with run_server({"model.id": model, "max_running": RUNNING, "max_waiting": WAITING}) as started:
        report = measure_full_queue(started, requests=20, tokens=400)
        assert started.idle_gauges() == NOTHING
    for result in (report.one_after_another, report.eight_at_a_time):
        assert result.statuses == {"429": 20}
        assert result.with_retry_after == 20
    assert report.completed == report.accepted == RUNNING + WAITING


def test_fuzz__no_request_makes_the_server_fail(model: Path) -> None:
    with run_server({"model.id": model, "max_new_tokens": NEW_TOKENS}) as started:
        report = send_cases(started, cases=120, seed=5)
        assert started.stop().exit_code == 0
    assert report.cases >= 60
    assert report.wrong == []
    assert {"200", "400", "404"} <= report.statuses.keys()
    assert report.left == NOTHING
    assert report.answers_afterwards
