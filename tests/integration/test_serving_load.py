"""The server under overload, disconnects and requests that no client would send."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2
import pytest

from benchmarks.serving import departures
from benchmarks.serving.server import IDLE_GAUGES, ServerProcess
from tests.builders.forked import run_server
from tests.builders.fuzz_cases import NEW_TOKENS, find_fault, schema_cases
from tests.builders.models import changed
from tests.builders.server_load import complete

NOTHING = dict.fromkeys(IDLE_GAUGES, 0.0)
TOKENS_COUNTER = "vllm:generation_tokens_total"
TOGETHER = 16


@pytest.fixture(scope="module")
def running(speaking, tmp_path_factory):
    # Its requests shall not end by themselves.
    target = tmp_path_factory.mktemp("longer") / "model"
    longer = changed(speaking, target, "config.json", max_position_embeddings=16384)
    with run_server({"model.id": longer, "max_new_tokens": 10_000}) as started:
        yield started


def leave_all(url: str, leaving: list[departures.Departure]) -> None:
    """Lets clients leave, `TOGETHER` at a time."""
    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(lambda one: asyncio.run(departures.leave(url, one)), leaving))


def greedy_text(target: ServerProcess) -> str:
    """Returns an answer that is always the same."""
    body = {"prompt": departures.PROMPTS[0], "max_tokens": 24, "temperature": 0}
    answer = httpx2.post(f"{target.api}/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["text"]


def test_disconnects__leak_no_slot_thread_or_descriptor(running) -> None:
    drawn = partial(departures.random_departures, tokens=10_000, prompts=departures.PROMPTS)
    tokens = running.metrics().get(TOKENS_COUNTER, 0.0)
    # The first requests make threads and memory that stay.
    departures.fill_pool(running)
    leave_all(running.url, drawn(48, seed=4))
    expected = greedy_text(running)
    time.sleep(0.5)
    before = departures.idle_footprint(running)
    left = drawn(30, seed=3)
    assert {departure.when for departure in left} == set(departures.LeaveMoment)
    leave_all(running.url, left)
    running.wait_idle()
    # Abandoned generations were cancelled.
    assert running.metrics()[TOKENS_COUNTER] - tokens < (48 + 30) * 10_000 / 10
    assert greedy_text(running) == expected
    after = departures.idle_footprint(running, before)
    assert running.idle_gauges() == NOTHING
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors


def test_fuzz__no_request_makes_the_server_fail(speaking) -> None:
    with run_server({"model.id": speaking, "max_new_tokens": NEW_TOKENS}) as started:
        cases = list(schema_cases(started.url, 80, seed=5))
        random.Random(5).shuffle(cases)
        with httpx2.Client(timeout=120) as client, ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda case: find_fault(client, case), cases))
        started.wait_idle()
        assert complete(started.url, 4).status == 200
        started.wait_idle()  # a request's place is free only after it was answered
        assert started.stop().exit_code == 0
    assert [fault for _, fault in results if fault is not None] == []
    statuses = [status for status, _ in results if status is not None]
    assert len(statuses) >= 40
    assert {200, 400, 404} <= set(statuses)
