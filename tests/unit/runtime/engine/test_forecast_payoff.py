"""Predictors are turned off where they take longer than what they can save."""

from dataclasses import dataclass, field

import pytest

from runtime.engine.forecast_payoff import FIRST_PAUSE, FIRST_STEPS, MEASURED_STEPS, ForecastPayoff
from runtime.policy.adaptive_switch import FIRST_STRETCH, PROBE_STEPS, WARM_UP, AdaptiveSwitch
from runtime.policy.counters import CacheCounters

MIB = 2**20


@dataclass
class Machine:
    """Totals that grow with every decode step, of one layer."""

    used_bytes: int
    """Prefetched bytes that a step uses, at 1 MiB a millisecond, of twice as many moved."""
    predictor_seconds: float
    reuse_share: float = 0.0
    """Time of the reuse predictor as a share of the link's."""
    stall_share: float = 1.0
    """Time that steps wait as a share of the link's."""
    inline_seconds: float = 0.0
    reuse_seconds: float = 0.0
    busy_seconds: float = 0.0
    occupied_seconds: float = 0.0
    stall_seconds: float = 0.0
    predicts_reuse: bool = True
    counters: CacheCounters = field(default_factory=CacheCounters)

    def __post_init__(self):
        self.said = []
        self.adaptive = AdaptiveSwitch(report=self.said.append)
        self.payoff = ForecastPayoff(
            self, self.adaptive, [self], lambda: [self.counters], lambda: self.stall_seconds
        )

    @property
    def seconds(self):
        return self.inline_seconds

    def run(self, steps):
        for _ in range(steps):
            link_seconds = 2e-3 * self.used_bytes / MIB
            self.counters.bytes_moved += 2 * self.used_bytes
            self.busy_seconds += link_seconds
            self.occupied_seconds += link_seconds
            self.stall_seconds += self.stall_share * link_seconds
            if self.adaptive.is_on:
                self.counters.bytes_prefetched += 2 * self.used_bytes
                self.counters.bytes_used += self.used_bytes
                self.inline_seconds += self.predictor_seconds
            if self.predicts_reuse:
                self.reuse_seconds += self.reuse_share * link_seconds
            self.payoff.record_step()


@pytest.mark.parametrize(("predictor_seconds", "stays"), [(0.009, True), (0.011, False)])
def test_payoff__prefetching_ends_where_forecasts_take_longer_than_the_hidden_transfers(
    predictor_seconds, stays
):
    machine = Machine(used_bytes=10 * MIB, predictor_seconds=predictor_seconds)
    machine.run(FIRST_STEPS)
    assert machine.adaptive.is_on  # the measurement has not ended
    machine.run(1)
    assert machine.adaptive.is_on is stays
    assert (
        machine.said == []
        if stays
        else ["prefetching turned off: forecasts took 11.00 ms a token and saved at most 10.00 ms"]
    )


def test_payoff__prefetching_comes_back_by_comparison():
    machine = Machine(used_bytes=0, predictor_seconds=0.01)
    machine.run(1 + FIRST_STEPS)
    assert not machine.adaptive.is_on
    machine.used_bytes, machine.predictor_seconds = 100 * MIB, 0.001
    for _ in range(2 * FIRST_STRETCH):
        machine.adaptive.record_step(0.01 if machine.adaptive.is_on else 0.05)
    assert machine.adaptive.is_on


@pytest.mark.parametrize(("share", "stays"), [(0.2, True), (0.3, False)])
def test_payoff__reuse_is_not_predicted_where_it_takes_longer_than_eviction_can_save(share, stays):
    machine = Machine(used_bytes=10 * MIB, predictor_seconds=0.0, reuse_share=share)
    machine.run(1 + FIRST_STEPS)
    assert machine.predicts_reuse is stays
    # Measured again later, with the predictor on.
    machine.reuse_share = 0.1
    machine.run(FIRST_PAUSE + MEASURED_STEPS)
    assert machine.predicts_reuse


@pytest.mark.parametrize(("stall_share", "stays"), [(0.11, True), (0.09, False)])
def test_payoff__reuse_is_not_predicted_where_prefetching_hides_the_transfers(stall_share, stays):
    machine = Machine(
        used_bytes=10 * MIB, predictor_seconds=0.0, reuse_share=0.1, stall_share=stall_share
    )
    machine.run(1 + FIRST_STEPS)
    assert machine.predicts_reuse is stays


def test_payoff__a_cache_that_holds_everything_is_not_judged():
    machine = Machine(used_bytes=0, predictor_seconds=0.0)
    machine.run(10 * FIRST_PAUSE)
    assert machine.adaptive.is_on
    assert machine.predicts_reuse


@pytest.mark.parametrize(
    ("predictor_seconds", "stall_share", "compares"),
    [
        (0.001, 0.1, False),  # 10 of 20 ms of transfers were needed, and 2 were waited for
        (0.001, 0.4, True),  # 8 of them were waited for
        (0.004, 0.1, True),
    ],
)
def test_payoff__prefetching_is_not_tried_without_where_it_surely_pays(
    predictor_seconds, stall_share, compares
):
    machine = Machine(
        used_bytes=10 * MIB, predictor_seconds=predictor_seconds, stall_share=stall_share
    )
    settings = []
    for _ in range(WARM_UP + PROBE_STEPS):
        machine.adaptive.record_step(0.03)
        machine.run(1)
        settings.append(machine.adaptive.is_on)
    assert (not all(settings)) is compares
    # It is compared later all the same: what was measured may have changed.
    for _ in range(FIRST_STRETCH + PROBE_STEPS):
        machine.adaptive.record_step(0.03)
        settings.append(machine.adaptive.is_on)
    assert not all(settings)
