"""The server's process under clients that ask for too much, leave, or send nonsense: what the
benchmarks of `benchmarks/serving` do for minutes, for seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serving.context import with_context
from benchmarks.serving.disconnects import disconnects
from benchmarks.serving.fuzz import NEW_TOKENS, fuzz
from benchmarks.serving.leaving import Leaves, departures
from benchmarks.serving.queue import RUNNING, WAITING, full
from benchmarks.serving.server import TAKEN, Server, server
from benchmarks.serving.storm import storm
from tests.builders.serving import speaking_model

pytestmark = pytest.mark.timeout(240)
NOTHING = dict.fromkeys(TAKEN, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("model") / "speaking")


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    longer = with_context(tmp_path_factory.mktemp("longer") / "model", 16384, model=model)
    with server({"model.id": longer, "max_new_tokens": 10_000}) as started:
        yield started


def test_storm__of_clients_that_leave_lets_the_next_one_be_answered(running: Server) -> None:
    found = storm(running, requests=40, tokens=10_000)
    assert found["ends"] == {"timeout": 40}
    assert (found["next_status"], found["next_tokens"]) == (200, 10)
    assert found["left"] == NOTHING
    # Nobody went on with what nobody waits for.
    assert found["tokens_generated"] < found["tokens_asked_for"] / 10


def test_disconnects__leak_no_slot_thread_or_descriptor(running: Server) -> None:
    found = disconnects(running, requests=50, tokens=10_000, seed=3)
    assert set(found["left_when"]) == set(Leaves)
    assert found["left"] == NOTHING
    assert found["threads_leaked"] <= 0
    assert found["descriptors_leaked"] <= 0
    assert found["same_answer_afterwards"]


def test_departures__are_the_same_for_the_same_seed() -> None:
    def made(seed: int) -> list:
        return departures(30, seed=seed, tokens=5, prompts=["a", "b"])

    assert made(1) == made(1) != made(2)


def test_full_queue__refuses_with_a_time_to_come_back_and_completes_what_it_took(
    model: Path,
) -> None:
    with server({"model.id": model, "max_running": RUNNING, "max_waiting": WAITING}) as started:
        found = full(started, requests=20, tokens=200)
        assert started.taken() == NOTHING
    for told in (found["one_after_another"], found["8_at_a_time"]):
        assert told["statuses"] == {"429": 20}
        assert told["with_retry_after"] == 20
    assert found["completed"] == found["accepted"] == RUNNING + WAITING


def test_fuzz__no_request_makes_the_server_fail(model: Path) -> None:
    with server({"model.id": model, "max_new_tokens": NEW_TOKENS}) as started:
        found = fuzz(started, cases=120, seed=5)
        assert started.end()["exit_code"] == 0
    assert found["cases"] >= 60
    assert found["wrong"] == []
    assert {"200", "400", "404"} <= found["statuses"].keys()
    assert found["left"] == NOTHING
    assert found["answers_afterwards"]
