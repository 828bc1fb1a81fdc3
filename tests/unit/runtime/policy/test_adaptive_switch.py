"""Prefetching is switched off where it loses, by the steps' own times."""

import numpy as np
import pytest

from runtime.config import SystemConfig
from runtime.policy import adaptive_switch
from runtime.policy.adaptive_switch import (
    DOUBTFUL_TURN_STEPS,
    FIRST_STRETCH,
    LONGEST_STRETCH,
    MOST_REPEATS,
    PERIOD,
    PROBE_STEPS,
    TURN_STEPS,
    TURNS,
    WARM_UP,
    AdaptiveSwitch,
)
from runtime.policy.build import adapt_to_link
from runtime.sim.replay import make_switch
from tests.unit.runtime.policy.test_device_cache import make_cache


def run(adaptive: AdaptiveSwitch, steps: int, *, with_it: float, without: float) -> list[bool]:
    settings = []
    for _ in range(steps):
        settings.append(adaptive.is_on)
        adaptive.record_step(with_it if adaptive.is_on else without)
    return settings


def test_adaptive_prefetch__turns_off_a_loss_and_reports_it():
    said = []
    adaptive = AdaptiveSwitch(report=said.append)
    settings = run(adaptive, WARM_UP + PROBE_STEPS + FIRST_STRETCH, with_it=0.030, without=0.025)
    assert settings[:WARM_UP] == [True] * WARM_UP
    turns = settings[WARM_UP : WARM_UP + PROBE_STEPS]
    period = [False] * TURN_STEPS + [True] * (PERIOD - TURN_STEPS)
    assert turns == period * (PROBE_STEPS // PERIOD)
    assert not any(settings[WARM_UP + PROBE_STEPS :])
    assert said == [
        "prefetching turned off: time per output token is 30.00 ms with it, 25.00 ms without"
    ]
    assert adaptive.num_switches == 1


def test_adaptive_prefetch__keeps_the_faster_and_compares_rarely():
    adaptive = AdaptiveSwitch(report=lambda _: None)
    settings = run(adaptive, 40_000, with_it=0.020, without=0.025)
    assert adaptive.num_switches == 0
    off = settings.count(False)
    # Each comparison costs a quarter of its steps; stretches double up to the longest.
    each = PROBE_STEPS * TURN_STEPS // PERIOD
    assert 8 * each <= off <= 16 * each
    assert settings[-LONGEST_STRETCH:].count(False) <= each


def test_adaptive_prefetch__turns_on_again_when_it_pays():
    adaptive = AdaptiveSwitch(report=lambda _: None)
    run(adaptive, WARM_UP + PROBE_STEPS, with_it=0.03, without=0.02)
    assert not adaptive.is_on
    run(adaptive, FIRST_STRETCH + PROBE_STEPS, with_it=0.01, without=0.02)
    assert adaptive.is_on
    assert adaptive.num_switches == 2


def share_off(steps: int, *, with_it: float, without: float) -> float:
    """Of the steps of 20 runs whose times vary by a third from token to token."""
    off = 0
    for seed in range(20):
        adaptive = AdaptiveSwitch(report=lambda _: None)
        for one in np.random.default_rng(seed).normal(1.0, 0.33, steps).clip(0.2):
            off += not adaptive.is_on
            adaptive.record_step(float(one) * (with_it if adaptive.is_on else without))
    return off / (20 * steps)


def test_adaptive_prefetch__stays_on_despite_varying_misses():
    """Prefetching saves a tenth: it stays, whatever the luck of a few tokens, or comes back at the
    next comparison."""
    assert share_off(3000, with_it=0.018, without=0.020) < 0.05


LOSSES = [(1.33, 300, 0.5), (1.2, 1000, 0.5), (1.33, 4000, 0.9)]


@pytest.mark.parametrize(("loss", "steps", "least_off"), LOSSES)
def test_adaptive_prefetch__finds_a_loss_despite_varying_misses(loss, steps, least_off):
    assert share_off(steps, with_it=loss, without=1.0) > least_off


def test_adaptive_prefetch__repeats_a_doubtful_comparison_at_once_but_not_forever(monkeypatch):
    monkeypatch.setattr(adaptive_switch, "SURE", np.inf)
    adaptive = AdaptiveSwitch(report=lambda _: None)
    compared = WARM_UP + (1 + MOST_REPEATS) * (PROBE_STEPS + 1)
    settings = run(adaptive, compared + FIRST_STRETCH - 1, with_it=0.03, without=0.02)
    assert settings[:WARM_UP].count(False) == 0
    first, rest = np.split(np.array(settings[WARM_UP : compared - 1]), [PROBE_STEPS])
    assert np.count_nonzero(~first) == TURNS * TURN_STEPS
    # One step lies between two comparisons.
    repeats = rest.reshape(MOST_REPEATS, 1 + PROBE_STEPS)
    assert repeats[:, 0].all()
    assert (np.count_nonzero(~repeats, axis=1) == TURNS * DOUBTFUL_TURN_STEPS).all()
    assert all(settings[compared:])
    assert adaptive.num_switches == 0


def test_adaptive_prefetch__ignores_slow_first_tokens():
    """Every 20th token takes ten times as long, whatever the setting: medians of turns that
    alternate do not see it."""
    adaptive = AdaptiveSwitch(report=lambda _: None)
    for step in range(3000):
        base = 0.020 if adaptive.is_on else 0.022
        adaptive.record_step(base * (10 if step % 20 == 0 else 1))
    assert adaptive.num_switches == 0


@pytest.mark.parametrize("idle_prefetch", [True, False])
def test_make_switch__ends_idle_prefetch_too(idle_prefetch):
    options = {"eviction": "reuse", "adaptive": True, "per_layer": False}
    core = make_cache(**options, idle_prefetch=idle_prefetch)
    switch = make_switch(core.system, core.set_idle_prefetch)
    assert switch is not None
    assert core.top.idle_prefetch is idle_prefetch
    run(switch, WARM_UP + PROBE_STEPS, with_it=0.03, without=0.02)
    assert not switch.is_on
    assert core.top.idle_prefetch is False


@pytest.mark.parametrize(("slows_computing", "fills"), [(True, False), (False, True)])
def test_adapt_to_link__slow_computing_ends_idle_prefetch(slows_computing, fills):
    system = SystemConfig(eviction="reuse", idle_prefetch=True, per_layer=False)
    assert adapt_to_link(system, slows_computing=slows_computing).idle_prefetch is fills
    assert not adapt_to_link(SystemConfig(), slows_computing=slows_computing).idle_prefetch
