"""Prefetching is bounded by what the link can bring and switched off where it loses."""

import numpy as np
import pytest

from predictors.base import Forecast
from runtime.policy.governor import (
    FIRST_STRETCH,
    LONGEST_STRETCH,
    PROBE_STEPS,
    Governor,
    Switch,
    Window,
)
from runtime.policy.planner import Planner, nearest_layer_first
from tests.unit.runtime.policy.test_prefetcher import CHUNKS, prefetcher


def run(switch: Switch, steps: int, *, with_it: float, without: float) -> list[bool]:
    settings = []
    for _ in range(steps):
        settings.append(switch.prefetching)
        switch.step_ended(with_it if switch.prefetching else without)
    return settings


def test_switch__turns_off_what_loses_and_says_so():
    said = []
    switch = Switch(said=said.append)
    settings = run(switch, 2 * PROBE_STEPS + FIRST_STRETCH, with_it=0.030, without=0.025)
    assert settings[:PROBE_STEPS] == [True] * PROBE_STEPS
    assert not any(settings[PROBE_STEPS:])
    assert said == ["prefetching turned off: a token takes 30.00 ms with it, 25.00 ms without"]
    assert switch.num_switches == 1


def test_switch__keeps_what_wins_and_tries_again_ever_more_rarely():
    switch = Switch(said=lambda _: None)
    settings = run(switch, 40_000, with_it=0.020, without=0.025)
    assert switch.num_switches == 0
    off = settings.count(False)
    assert 10 * PROBE_STEPS <= off <= 16 * PROBE_STEPS
    assert settings[-LONGEST_STRETCH + PROBE_STEPS :].count(False) <= PROBE_STEPS


def test_switch__comes_back_when_prefetching_pays_again():
    switch = Switch(said=lambda _: None)
    run(switch, 2 * PROBE_STEPS, with_it=0.03, without=0.02)
    assert not switch.prefetching
    run(switch, FIRST_STRETCH + PROBE_STEPS, with_it=0.01, without=0.02)
    assert switch.prefetching
    assert switch.num_switches == 2


def test_switch__jitter_does_not_turn_anything():
    switch = Switch(said=lambda _: None)
    noise = np.random.default_rng(0).normal(0.02, 0.0002, 5000)
    for seconds in noise:
        switch.step_ended(float(seconds))
    assert switch.num_switches == 0


def test_window__is_bandwidth_times_time():
    window = Window()
    assert window.num_bytes(1) == float("inf")
    for _ in range(200):
        window.transferred(1000, 0.001)
        window.layer_passed(0.002)
    assert window.num_bytes(1) == pytest.approx(2000)
    assert window.num_bytes(3) == pytest.approx(6000)
    assert window.num_bytes(0) == pytest.approx(2000)


def planner(num_bytes: float) -> Planner:
    governor = Governor()
    governor.window.transferred(int(num_bytes), 1.0)
    governor.window.layer_passed(1.0)
    return Planner(prefetcher(), top_k=3, urgency=nearest_layer_first, governor=governor)


def forecast(layer: int) -> Forecast:
    scores = np.array([[0.9, 0.1, 0.8, 0.2, 0.7, 0.3]], dtype=np.float32)
    return Forecast(layer=layer, scores_TE=scores)


@pytest.mark.parametrize(("experts_that_fit", "expected"), [(0.9, []), (1, [0]), (2.5, [0, 2])])
def test_planner__asks_for_the_likeliest_that_can_arrive(experts_that_fit, expected):
    one = planner(experts_that_fit * sum(CHUNKS))
    one.plan([forecast(1)], layer_now=0)
    assert [expert for _, expert in one._prefetcher.top.queue.low()] == expected


def test_planner__counts_what_is_queued_already():
    one = planner(2 * sum(CHUNKS))
    one.plan([forecast(1)], layer_now=0)
    one.plan([forecast(2)], layer_now=0)
    queued = one._prefetcher.top.queue.low()
    assert [expert for expert in queued if expert[0] == 1] == [(1, 0), (1, 2)]
    assert [expert for expert in queued if expert[0] == 2] == [(2, 0), (2, 2)]
