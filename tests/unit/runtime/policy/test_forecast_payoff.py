"""Forecasts are made where they take less than the waiting that they remove."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from runtime.config import SystemConfig
from runtime.policy import forecast_payoff
from runtime.policy.counters import CacheCounters
from runtime.policy.forecast_payoff import FIRST_PAUSE, LONGEST_PAUSE, WATCHED, ForecastPayoff

BYTES = 10_000
"""Of a millisecond of the link."""
MEASURED = forecast_payoff.SKIPPED + forecast_payoff.ON_STEPS
"""First steps, with forecasts."""
WITHOUT = forecast_payoff.SKIPPED_OFF + forecast_payoff.OFF_STEPS
"""Steps of a trial without them."""


@dataclass
class Machine:
    """Totals that grow with every step, in milliseconds, of one layer."""

    needed: float = 20.0
    """Transfers that a step needs; without forecasts it waits for all of them."""
    hidden: float = 10.0
    """Those that forecasts begin in time."""
    forecast: float = 1.0
    slowed: float = 0.0
    """What transfers next to it take from the computation of a step with forecasts."""
    reuse: float = 0.0
    computing: float = 30.0
    counters: CacheCounters = field(default_factory=CacheCounters)
    settings: list[bool] = field(default_factory=list)
    """Whether forecasts were used, of each decode step."""
    changes: list[bool] = field(default_factory=list)
    """Settings of idle links."""
    stall_seconds = link_seconds = inline_seconds = reuse_seconds = total = 0.0
    uses_forecasts = predicts_reuse = True

    def __post_init__(self) -> None:
        known = {"counters": [self.counters], "system": SystemConfig(idle_prefetch=True)}
        cache = SimpleNamespace(**known, set_idle_prefetch=self.changes.append)
        self.payoff = ForecastPayoff(self, cache, self)

    @property
    def links(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(tier=SimpleNamespace(is_top=True), busy_seconds=self.link_seconds)]

    def step(self, *, is_decode: bool = True, times: float = 1.0) -> None:
        is_on = self.payoff.is_on
        hidden = self.hidden * is_on
        if is_decode:
            self.payoff.begin_step()
        stall, forecast = times * (self.needed - hidden), self.forecast * is_on
        reuse = self.reuse * self.predicts_reuse
        self.counters.bytes_moved += int(times * self.needed * BYTES)
        self.counters.bytes_prefetched += int(hidden * BYTES)
        self.counters.bytes_used += int(hidden * BYTES)
        self.link_seconds += times * self.needed / 1e3
        self.stall_seconds += stall / 1e3
        self.inline_seconds += forecast / 1e3
        self.reuse_seconds += reuse / 1e3
        seconds = stall + forecast + reuse + self.slowed * is_on + self.computing
        self.total += seconds
        if is_decode:
            self.settings.append(is_on)
            self.payoff.record_step(seconds / 1e3)

    def run(self, steps: int) -> list[bool]:
        """Runs decode steps; returns their settings."""
        for _ in range(steps):
            self.step()
        return self.settings[-steps:]


def test_payoff__what_surely_pays_is_never_tried_without() -> None:
    machine = Machine(hidden=10.0, forecast=2.0)
    assert all(machine.run(2 * LONGEST_PAUSE))
    assert machine.payoff.num_switches == 0


def test_payoff__a_cache_that_holds_everything_is_not_judged() -> None:
    machine = Machine(needed=0.0, hidden=0.0, forecast=0.0)
    assert all(machine.run(10 * FIRST_PAUSE))
    assert machine.predicts_reuse


def test_payoff__what_cannot_pay_ends_without_a_trial(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    machine = Machine(hidden=10.0, forecast=11.0)
    assert all(machine.run(MEASURED))
    assert not any(machine.run(FIRST_PAUSE))
    assert caplog.messages == [
        "prefetching turned off: forecasts take 11.00 ms a token, transfers of 10.00 ms are hidden "
        "by them, steps wait for others 10.00 ms"
    ]


@pytest.mark.parametrize(("slowed", "pays"), [(5.0, True), (7.0, False)])
def test_payoff__a_trial_decides_within_16_tokens_what_is_doubtful(slowed, pays):
    machine = Machine(hidden=10.0, forecast=4.0, slowed=slowed)
    assert MEASURED + WITHOUT < 16
    assert machine.run(MEASURED + WITHOUT) == [True] * MEASURED + [False] * WITHOUT
    assert machine.changes == [False, True][: 1 + pays]
    assert machine.run(FIRST_PAUSE - WATCHED) == [pays] * (FIRST_PAUSE - WATCHED)
    assert machine.payoff.num_switches == (0 if pays else 1)


def test_payoff__prompts_between_the_steps_do_not_count() -> None:
    machine = Machine(hidden=10.0, forecast=4.0, slowed=5.0)
    for number in range(MEASURED + WITHOUT):
        if number % 3 == 0:
            machine.step(is_decode=False, times=30.0)
        machine.step()
    assert machine.payoff.is_on


@pytest.mark.parametrize("forecast", [0.5, 2.0, 4.0, 6.0, 8.0, 12.0, 20.0])
@pytest.mark.parametrize("hidden", [1.0, 5.0, 15.0])
@pytest.mark.parametrize("slowed", [0.0, 4.0])
def test_payoff__loses_little_whatever_pays(hidden: float, forecast: float, slowed: float) -> None:
    """Not even where forecasts take half of a step's time, in an answer of 500 tokens."""
    machine = Machine(hidden=hidden, forecast=forecast, slowed=slowed)
    machine.run(500)
    without = machine.computing + machine.needed
    assert machine.total <= 1.03 * 500 * min(without, without - hidden + forecast + slowed)


def test_payoff__is_tried_again_when_other_prompts_need_more() -> None:
    machine = Machine(hidden=4.0, forecast=6.0)
    machine.run(MEASURED + 10 * FIRST_PAUSE)
    assert not machine.payoff.is_on
    machine.needed, machine.hidden = 60.0, 40.0
    settings = machine.run(4 * WATCHED)
    assert settings.index(True) <= 2 * WATCHED
    assert settings[-1]


def test_payoff__ends_soon_when_forecasts_hide_nothing_any_more() -> None:
    machine = Machine(hidden=10.0, forecast=2.0)
    machine.run(10 * FIRST_PAUSE)
    machine.hidden = 1.0
    assert not machine.run(3 * WATCHED)[-1]


def test_payoff__is_tried_again_after_more_and_more_steps() -> None:
    machine = Machine(hidden=5.0, forecast=6.0)
    settings = machine.run(3 * LONGEST_PAUSE)
    trials = [i for i in range(1, len(settings)) if settings[i] and not settings[i - 1]]
    pauses = [later - earlier for earlier, later in zip(trials, trials[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert trials[0] == MEASURED + FIRST_PAUSE
    assert pauses[-1] > 10 * FIRST_PAUSE
    assert machine.payoff.num_switches == 1


WAITING, HIDDEN = {"needed": 20.0, "hidden": 10.0}, {"needed": 10.0, "hidden": 9.5}
REUSE = [(WAITING, 4.0, True), (WAITING, 6.0, False), (HIDDEN, 0.2, True), (HIDDEN, 0.3, False)]


@pytest.mark.parametrize(("transfers", "reuse", "stays"), REUSE)
def test_payoff__reuse_predictions_take_no_longer_than_eviction_saves(transfers, reuse, stays):
    """Prefetching that hides the transfers leaves eviction little to save."""
    machine = Machine(**transfers, forecast=1.0, reuse=reuse)
    machine.run(MEASURED)
    assert machine.predicts_reuse is stays
    machine.reuse = 0.1
    machine.run(4 * FIRST_PAUSE)
    assert machine.predicts_reuse
