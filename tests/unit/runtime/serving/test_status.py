"""The status reports what is known, with the last answers; the heap is trimmed when that is due."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import ModelConfig, SystemConfig
from runtime.presets import load_system
from runtime.serving import app
from runtime.serving.app import HeapTrimmer
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.config import ServeConfig
from runtime.serving.observe import status as observed
from runtime.serving.service import GenerationService
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import serve
from tests.builders.waiting import wait_for
from tests.unit.runtime.serving.test_metrics import make_choice, step

SYSTEM = SystemConfig(name="promoe", eviction="lru")
CONFIG = ServeConfig(model=ModelConfig(name="m"), max_running=2, max_waiting=3, system=SYSTEM)


def watched(open_model: Callable[[], object]) -> tuple[GenerationService, observed.Telemetry]:
    service = GenerationService(open_model, max_running=2, max_waiting=3)
    return service, observed.Telemetry(service, CONFIG, version="9")


def test_status__of_a_model_that_is_loading() -> None:
    _, telemetry = watched(dict)
    status = telemetry.status()
    assert status["memory"]["resident_bytes"] > 0
    assert "experts" not in status
    expected = {
        "model": "m", "state": "loading", "served": None, "answers": [],
        "queue": {"running": 0, "waiting": 0, "max_running": 2, "max_waiting": 3},
        "tokens": {"prompt": 0, "reused": 0, "generated": 0, "generated_per_second": 0},
        "latency": {"num_answers": 0, "ttft_seconds": None, "tpot_seconds": None},
    }  # fmt: skip
    assert {name: status[name] for name in expected} == expected


def test_status__includes_the_engine_once_it_is_ready(tmp_path):
    # On the computing thread: the forecasts of another one may come after the status.
    system = replace(load_system("moecast"), synchronous=True)
    budgets = {"budget": "50%", "host_budget": "100%"}
    model = serve(tiny_qwen2_moe(tmp_path), **budgets, predictor="skip", system=system)
    info, group = SimpleNamespace(max_length=64, kv_budget=None), SimpleNamespace(close=dict)
    loaded = SimpleNamespace(model=model, info=info, kept=None, group=group)
    service, telemetry = watched(lambda: loaded)
    service.start()
    wait_for(lambda: "cells" in telemetry.status())
    model(torch.tensor([[1, 2, 3]]))
    status = telemetry.status()
    assert telemetry.metrics.render()[1].startswith("text/plain")
    service.drain()
    assert telemetry.status()["state"] == "draining"
    assert service.close(timeout_seconds=60)
    served = {"system": "promoe", "eviction": "lru", "predictor": "skip", "num_layers": 2}
    served |= {"num_experts": 8, "top_k": 2, "budget_bytes": model.moecast.budget_bytes}
    assert status["served"] == served
    assert [tier["name"] for tier in status["tiers"]] == ["device", "host"]
    assert [len(row) for row in status["cells"]] == [8, 8]
    experts = status["experts"]
    assert experts["requests"] == sum(row["requests"] for row in status["layers"]) > 0
    assert experts["hit_rate"] == experts["hits"] / experts["requests"]
    # Every expert that was copied from host memory was read from the disk before.
    assert 0 < status["bytes_from"]["host"] == experts["bytes_moved"]
    assert min(status["bytes_from"]["disk"], status["seconds"]["predictor"]) > 0
    # Without an entry there is no card, and no drift.
    assert (status["faults"], status["lost_threads"], status["predictor_drift"]) == ({}, 0, None)
    assert status["prefetching"] is model.moecast.engine.payoff.is_on
    assert telemetry.metrics.loaded is loaded


START = datetime(2026, 11, 22, 8, 30, tzinfo=UTC)


class Server:
    """Recent answers with a clock that the test moves."""

    def __init__(self) -> None:
        self.seconds, self.num_tokens = 1000.0, 0
        self.recent = observed.RecentAnswers(
            lambda: self.num_tokens,
            clock=lambda: self.seconds,
            now=lambda: START + timedelta(seconds=self.seconds - 1000),
        )

    def start(self, name: str = "r", prompt_tokens: int = 3) -> CompletionChoice:
        return make_choice(num_prompt_tokens=prompt_tokens, at=self.seconds, request_id=name)

    def step(self, *choices: CompletionChoice, seconds: float) -> None:
        """Add a token to each choice after some time."""
        self.seconds += seconds
        self.num_tokens += len(choices)
        step(self.recent, self.seconds, *choices)

    def end(self, choice: CompletionChoice, reason: FinishReason = FinishReason.LENGTH) -> None:
        choice.finish_reason = reason
        self.recent.on_ended(choice)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_percentiles__are_the_smallest_values_that_enough_are_below(values: list[float]) -> None:
    for percent in (50, 90, 99):
        enough = [v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values)]
        assert observed.percentiles(values)[f"p{percent}"] == min(enough)


def test_answers__have_their_counts_and_latencies() -> None:
    server = Server()
    choice = server.start("abc", prompt_tokens=5)
    for seconds in (0.5, 0.25, 0.75):
        server.step(choice, seconds=seconds)
    server.end(choice, FinishReason.STOP)
    answer = {"id": "abc", "ended_at": "2026-11-22T08:30:01+00:00", "finish_reason": "stop"}
    answer |= {"prompt_tokens": 5, "new_tokens": 3, "ttft_seconds": 0.5, "tpot_seconds": 0.5}
    assert server.recent.last() == [answer]
    half = {"p50": 0.5, "p90": 0.5, "p99": 0.5}
    expected = {"num_answers": 1, "ttft_seconds": half, "tpot_seconds": half}
    assert server.recent.latencies() == expected


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_answers__without_enough_tokens_have_no_latency(num_tokens: int) -> None:
    server = Server()
    choice = server.start()
    for _ in range(num_tokens):
        server.step(choice, seconds=0.5)
    server.end(choice, FinishReason.ABORT)
    (answer,) = server.recent.last()
    assert answer["ttft_seconds"] == (0.5 if num_tokens else None)
    assert answer["tpot_seconds"] is server.recent.latencies()["tpot_seconds"] is None


def test_answers__are_bounded_and_the_newest_come_first() -> None:
    server = Server()
    total = observed.WINDOW_ANSWERS + 30
    for number in range(total):
        choice = server.start(str(number))
        server.step(choice, seconds=1 + number)
        server.end(choice)
    newest = [str(total - 1 - place) for place in range(observed.LISTED_ANSWERS)]
    assert [answer["id"] for answer in server.recent.last()] == newest
    latencies = server.recent.latencies()
    assert latencies["num_answers"] == observed.WINDOW_ANSWERS
    kept = sorted(1 + number for number in range(total))[-observed.WINDOW_ANSWERS :]
    assert latencies["ttft_seconds"]["p50"] == kept[math.ceil(observed.WINDOW_ANSWERS / 2) - 1]


@given(st.lists(st.tuples(st.floats(0, 4), st.integers(0, 3)), max_size=60))
def test_throughput__is_that_of_the_last_whole_seconds(steps: list[tuple[float, int]]) -> None:
    server = Server()
    choices = [server.start(str(number)) for number in range(3)]
    tokens: list[float] = []
    for seconds, num_choices in steps:
        server.step(*choices[:num_choices], seconds=seconds)
        tokens += [server.seconds] * num_choices
    now = math.floor(server.seconds)
    recent = [at for at in tokens if now - observed.RATE_SECONDS <= math.floor(at) < now]
    assert server.recent.tokens_per_second() == len(recent) / observed.RATE_SECONDS


TRIMS = [(range(100), False, [30, 60, 90]), ([29, 30.5, 31], True, [29, 30.5, 31])]


@pytest.mark.parametrize(("seconds", "is_idle", "expected"), TRIMS)
def test_trimmer__trims_once_an_interval_and_when_idle(seconds, is_idle, expected, monkeypatch):
    now, trims = [0.0], []
    monkeypatch.setattr(app, "return_free_heap", lambda: trims.append(now[0]))
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: now[0]))
    trimmer = HeapTrimmer()
    for now[0] in seconds:
        trimmer.on_step(0.1, [])
        if is_idle:
            trimmer.on_idle()
    assert trims == expected
