"""A predictor that fails ends no answer and changes none: experts are fetched on demand."""

import logging
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from predictors.base import Forecast, Predictor, Signal
from runtime.config import SystemConfig
from runtime.engine import predictor_guard
from runtime.engine.predictor_guard import MAX_SLOW_CALLS, PredictorGuard
from tests.builders.entries import tiny_spec
from tests.builders.lockstep import assert_equal, run_together
from tests.builders.models import GREEDY, TOKENS, plain_eager
from tests.builders.served import serving

SPEC = tiny_spec(num_layers=2, num_experts=8, top_k=2)
GOOD = np.full((1, SPEC.num_experts), 0.5, np.float32)


class Misbehaving(Predictor):
    """Forecasts the next layer well until call `good`, then does what `fail` does."""

    kind = "misbehaving"
    signals = frozenset({Signal.GATE_INPUT, Signal.ROUTED})

    def __init__(self, spec, fail, *, good: int = 0):
        super().__init__(spec)
        self.fail, self.good, self.num_calls = fail, good, 0

    def gate_input(self, layer, hidden_TD):
        self.num_calls += 1
        scores_TE = np.full((len(hidden_TD), self.spec.num_experts), 0.5, np.float32)
        forecasts = [Forecast((layer + 1) % self.spec.num_layers, scores_TE)]
        return forecasts if self.num_calls <= self.good else self.fail(forecasts)


def changed(**fields):
    return lambda forecasts: [replace(one, **fields) for one in forecasts]


def guard_of(predictor: Predictor) -> PredictorGuard:
    return PredictorGuard(predictor, role="predictor", consequence="experts come on demand")


FAILURES = {
    "error": (Mock(side_effect=RuntimeError("bad node")), "RuntimeError: bad node"),
    "memory": (Mock(side_effect=MemoryError("std::bad_alloc")), "MemoryError: std::bad_alloc"),
    "no-forecast": (lambda _: [3], "int in place of a forecast"),
    "no-list": (lambda _: 3, "not iterable"),
    "layer": (changed(layer=9), "layer 9 of 2"),
    "integers": (changed(scores_TE=np.ones((1, 8), np.int64)), "scores of type int64"),
    "list": (changed(scores_TE=[[0.5] * 8]), "scores of type list"),
    "shape": (changed(scores_TE=np.ones((1, 7), np.float32)), r"scores of shape \(1, 7\)"),
    "one-row": (changed(scores_TE=np.ones(8, np.float32)), r"scores of shape \(8,\)"),
    "nan": (changed(scores_TE=np.full((1, 8), np.nan, np.float32)), "not finite"),
    "priority": (changed(priority_E=np.full(8, np.inf, np.float32)), "not finite"),
    "wanted": (changed(wanted=[1, 8]), r"experts \[1, 8\] of 8"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_guard__turns_the_predictor_off_and_says_why(name, caplog):
    fail, message = FAILURES[name]
    predictor = Misbehaving(SPEC, fail, good=1)
    guard, hidden_TD = guard_of(predictor), np.zeros((1, SPEC.hidden_size), np.float32)
    assert len(guard.call("gate_input", 0, hidden_TD, num_tokens=1)) == 1
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not guard.call("gate_input", 0, hidden_TD, num_tokens=1)
    assert (predictor.num_calls, guard.predictor) == (2, None)
    assert re.search(message, guard.failure or "")
    (line,) = caplog.messages
    assert re.search("(?s)misbehaving failed.*experts come on demand", line)


def test_guard__ctrl_c_is_no_failure():
    guard = guard_of(Misbehaving(SPEC, Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        guard.call("gate_input", 0, GOOD, num_tokens=1)
    assert guard.predictor is not None


def test_guard__calls_over_the_deadline_turn_it_off(monkeypatch):
    clock, waited = [0.0], [0.0]
    time = SimpleNamespace(perf_counter=lambda: clock[0] + waited[0], thread_time=lambda: clock[0])
    monkeypatch.setattr(predictor_guard, "time", time)

    def take(seconds: float, *, waits: float = 0.0):
        def slow(forecasts: list[Forecast]) -> list[Forecast]:
            clock[0] += seconds
            waited[0] += waits
            return forecasts

        return slow

    predictor = Misbehaving(SPEC, None)
    guard = guard_of(predictor)
    # A busy machine may keep it waiting, and a long prompt may take longer.
    for fail, num_tokens in ((take(0.9), 1), (take(0.9, waits=9.0), 1), (take(3.0), 1500)):
        predictor.fail = fail
        for _ in range(9):
            assert guard.call("gate_input", 0, GOOD, num_tokens=num_tokens)
    for _ in range(MAX_SLOW_CALLS):
        assert guard.call("gate_input", 0, GOOD, num_tokens=1)
    assert not guard.call("gate_input", 0, GOOD, num_tokens=1)
    assert guard.failure == f"{MAX_SLOW_CALLS} calls took too long, the last one 3.0 s"


@pytest.mark.parametrize("role", ["predictor", "reuse_predictor"])
@pytest.mark.parametrize(("name", "num_together"), [("no-list", 0), ("memory", 3)])
def test_load__a_failing_predictor_changes_no_token(folder, name, num_together, role, monkeypatch):
    expected = plain_eager(folder).generate(TOKENS[:1], **GREEDY)
    fail, message = FAILURES[name]
    load = "load_forecaster" if role == "predictor" else "load_reuse"
    if role == "reuse_predictor":
        monkeypatch.setattr(Misbehaving, "routed", lambda self, *_: self.gate_input(0, GOOD))
    place = f"runtime.engine.forecasters.AvailablePredictors.{load}"
    monkeypatch.setattr(place, lambda it, *_: (Misbehaving(it.spec, fail, good=9), ""))
    system = SystemConfig(prefetch=role == "predictor", eviction="reuse", per_layer=False)
    with serving(folder, budget="50%", system=system) as model:
        generate = partial(model.generate, TOKENS[:1], **GREEDY)
        found = [*run_together(model, [generate] * num_together), generate(), generate()]
        assert_equal(found, [expected] * (num_together + 2))
        failures = model.moecast.stats()["predictor_failures"]
        assert list(failures) == [role]
        assert re.search(message, failures[role])
        assert model.moecast.engine.driver.predictor is None
