"""Prefetching is switched off where it loses, by the steps' own times."""

import numpy as np
import pytest

from runtime.config import SystemConfig
from runtime.policy.build import build_planner, build_prefetcher, on_link
from runtime.policy.governor import (
    FIRST_STRETCH,
    LONGEST_STRETCH,
    PERIOD,
    PROBE_STEPS,
    TURN_STEPS,
    WARM_UP,
    Switch,
)
from tests.unit.runtime.policy.test_prefetcher import CHUNKS
from tests.unit.runtime.policy.test_prefetcher_idle import SPEC


def run(switch: Switch, steps: int, *, with_it: float, without: float) -> list[bool]:
    settings = []
    for _ in range(steps):
        settings.append(switch.prefetching)
        switch.step_ended(with_it if switch.prefetching else without)
    return settings


def test_switch__turns_off_what_loses_and_says_so():
    said = []
    switch = Switch(said=said.append)
    settings = run(switch, WARM_UP + PROBE_STEPS + FIRST_STRETCH, with_it=0.030, without=0.025)
    assert settings[:WARM_UP] == [True] * WARM_UP
    turns = settings[WARM_UP : WARM_UP + PROBE_STEPS]
    period = [False] * TURN_STEPS + [True] * (PERIOD - TURN_STEPS)
    assert turns == period * (PROBE_STEPS // PERIOD)
    assert not any(settings[WARM_UP + PROBE_STEPS :])
    assert said == ["prefetching turned off: a token takes 30.00 ms with it, 25.00 ms without"]
    assert switch.num_switches == 1


def test_switch__keeps_what_wins_and_tries_again_ever_more_rarely():
    switch = Switch(said=lambda _: None)
    settings = run(switch, 40_000, with_it=0.020, without=0.025)
    assert switch.num_switches == 0
    off = settings.count(False)
    # Each comparison costs a quarter of its steps; stretches double up to the longest.
    each = PROBE_STEPS * TURN_STEPS // PERIOD
    assert 8 * each <= off <= 16 * each
    assert settings[-LONGEST_STRETCH:].count(False) <= each


def test_switch__comes_back_when_prefetching_pays_again():
    switch = Switch(said=lambda _: None)
    run(switch, WARM_UP + PROBE_STEPS, with_it=0.03, without=0.02)
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


def test_switch__tokens_that_miss_more_or_less_do_not_turn_what_pays():
    """Times vary by a third from token to token, prefetching saves a tenth: it stays, whatever the
    luck of a few tokens, or comes back at the next comparison."""
    off = 0
    for seed in range(20):
        switch = Switch(said=lambda _: None)
        noise = np.random.default_rng(seed).normal(1.0, 0.33, 3000).clip(0.2)
        for one in noise:
            off += not switch.prefetching
            switch.step_ended(float(one) * (0.018 if switch.prefetching else 0.020))
    assert off < 0.05 * 20 * 3000


def test_switch__finds_a_loss_of_a_third_among_such_tokens():
    on = 0
    for seed in range(20):
        switch = Switch(said=lambda _: None)
        noise = np.random.default_rng(seed).normal(1.0, 0.33, 6000).clip(0.2)
        for one in noise:
            on += switch.prefetching
            switch.step_ended(float(one) * (0.0267 if switch.prefetching else 0.020))
    assert on < 0.5 * 20 * 6000


def test_switch__slow_first_tokens_of_requests_are_no_reason_to_turn():
    """Every 20th token takes ten times as long, whatever the setting: medians of turns that
    alternate do not see it."""
    switch = Switch(said=lambda _: None)
    for step in range(3000):
        base = 0.020 if switch.prefetching else 0.022
        switch.step_ended(base * (10 if step % 20 == 0 else 1))
    assert switch.num_switches == 0


def test_switch__tells_each_change_of_setting():
    told = []
    switch = Switch(said=lambda _: None, turned=told.append)
    settings = run(switch, WARM_UP + PROBE_STEPS + 2, with_it=0.02, without=0.03)
    changes = [b for a, b in zip(settings, settings[1:], strict=False) if a != b]
    assert told == changes
    assert told[-1] is True


@pytest.mark.parametrize("fill_idle", [True, False])
def test_build_planner__what_is_switched_off_leaves_idle_links_alone(fill_idle):
    system = SystemConfig(eviction="reuse", governed=True, fill_idle=fill_idle, per_layer=False)
    core = build_prefetcher(system, SPEC, num_slots=[9], chunk_bytes=[CHUNKS] * SPEC.num_layers)
    planner = build_planner(system, SPEC, core)
    assert planner.governor is not None
    assert core.top.fills_idle is fill_idle
    run(planner.governor.switch, WARM_UP + PROBE_STEPS, with_it=0.03, without=0.02)
    assert not planner.governor.prefetching
    assert core.top.fills_idle is False


@pytest.mark.parametrize(("slows_computing", "fills"), [(True, False), (False, True)])
def test_on_link__where_reads_slow_the_computation_idle_links_stay_idle(slows_computing, fills):
    system = SystemConfig(eviction="reuse", fill_idle=True, per_layer=False)
    assert on_link(system, slows_computing=slows_computing).fill_idle is fills
    assert not on_link(SystemConfig(), slows_computing=slows_computing).fill_idle
