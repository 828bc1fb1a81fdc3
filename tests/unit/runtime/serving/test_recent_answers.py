"""The last answers: their percentiles, throughput and bounds, next to plain slow references."""

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.generation.sampling import SamplingParams
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.status import (
    LISTED_ANSWERS,
    RATE_SECONDS,
    WINDOW_ANSWERS,
    RecentAnswers,
    percentiles,
)

START = datetime(2026, 11, 22, 8, 30, tzinfo=UTC)


class Server:
    """Recent answers with a clock that the test moves."""

    def __init__(self) -> None:
        self.seconds, self.num_tokens = 1000.0, 0
        self.recent = RecentAnswers(
            lambda: self.num_tokens,
            clock=lambda: self.seconds,
            now=lambda: START + timedelta(seconds=self.seconds - 1000),
        )

    def start(self, name: str = "r", prompt_tokens: int = 3) -> CompletionChoice:
        sampling = SamplingParams(max_new_tokens=20)
        choice = CompletionChoice(
            [7] * prompt_tokens, sampling, deliver=lambda _: None, request_id=name
        )
        choice.arrived_at = self.seconds
        return choice

    def step(self, *choices: CompletionChoice, seconds: float) -> None:
        """Add a token to each choice after some time."""
        self.seconds += seconds
        for choice in choices:
            choice.num_tokens += 1
            self.num_tokens += 1
            choice.last_token_at = self.seconds
            choice.first_token_at = choice.first_token_at or self.seconds
        self.recent.on_step(seconds, list(choices))

    def end(self, choice: CompletionChoice, reason: FinishReason = FinishReason.LENGTH) -> None:
        choice.finish_reason = reason
        self.recent.on_ended(choice)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_percentiles__are_the_smallest_values_that_enough_are_below(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    for percent in (50, 90, 99):
        enough = [v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values)]
        assert found[f"p{percent}"] == min(enough)


def test_percentiles__of_nothing_are_not_measured() -> None:
    assert percentiles([]) is None
    assert percentiles([2.0]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert percentiles(list(range(1, 101))) == {"p50": 50, "p90": 90, "p99": 99}


def test_answers__have_their_counts_and_latencies() -> None:
    server = Server()
    choice = server.start("abc", prompt_tokens=5)
    server.step(choice, seconds=0.5)
    server.step(choice, seconds=0.25)
    server.step(choice, seconds=0.75)
    server.end(choice, FinishReason.STOP)
    assert server.recent.last() == [
        {
            "id": "abc",
            "ended_at": "2026-11-22T08:30:01+00:00",
            "prompt_tokens": 5,
            "new_tokens": 3,
            "ttft_seconds": 0.5,
            "tpot_seconds": 0.5,
            "finish_reason": "stop",
        }
    ]
    assert server.recent.latencies() == {
        "num_answers": 1,
        "ttft_seconds": {"p50": 0.5, "p90": 0.5, "p99": 0.5},
        "tpot_seconds": {"p50": 0.5, "p90": 0.5, "p99": 0.5},
    }


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_answers__without_enough_tokens_have_no_latency(num_tokens: int) -> None:
    server = Server()
    choice = server.start()
    for _ in range(num_tokens):
        server.step(choice, seconds=0.5)
    server.end(choice, FinishReason.ABORT)
    (answer,) = server.recent.last()
    assert answer["ttft_seconds"] == (0.5 if num_tokens else None)
    assert answer["tpot_seconds"] is None
    assert server.recent.latencies()["tpot_seconds"] is None


def test_answers__that_never_started_are_listed_too() -> None:
    server = Server()
    choice = CompletionChoice(
        [1], SamplingParams(max_new_tokens=1), deliver=lambda _: None, request_id="waited"
    )
    server.end(choice, FinishReason.ABORT)
    assert [answer["id"] for answer in server.recent.last()] == ["waited"]


def test_answers__are_bounded_and_the_newest_come_first() -> None:
    server = Server()
    total = WINDOW_ANSWERS + 30
    for number in range(total):
        choice = server.start(str(number))
        server.step(choice, seconds=1 + number)
        server.end(choice)
    assert [answer["id"] for answer in server.recent.last()] == [
        str(total - 1 - place) for place in range(LISTED_ANSWERS)
    ]
    latencies = server.recent.latencies()
    assert latencies["num_answers"] == WINDOW_ANSWERS
    kept = sorted(1 + number for number in range(total))[-WINDOW_ANSWERS:]
    assert latencies["ttft_seconds"]["p50"] == kept[math.ceil(WINDOW_ANSWERS / 2) - 1]


@given(st.lists(st.tuples(st.floats(0, 4), st.integers(0, 3)), max_size=60))
def test_throughput__is_that_of_the_last_whole_seconds(steps: list[tuple[float, int]]) -> None:
    server = Server()
    choices = [server.start(str(number)) for number in range(3)]
    tokens: list[float] = []
    for seconds, num_choices in steps:
        server.step(*choices[:num_choices], seconds=seconds)
        tokens += [server.seconds] * num_choices
    now = math.floor(server.seconds)
    recent = [at for at in tokens if now - RATE_SECONDS <= math.floor(at) < now]
    assert server.recent.tokens_per_second() == len(recent) / RATE_SECONDS


def test_throughput__of_an_idle_server_is_zero() -> None:
    server = Server()
    choice = server.start()
    server.step(choice, seconds=1)
    server.seconds += 1
    assert server.recent.tokens_per_second() == 1 / RATE_SECONDS
    server.seconds += RATE_SECONDS
    assert server.recent.tokens_per_second() == 0
