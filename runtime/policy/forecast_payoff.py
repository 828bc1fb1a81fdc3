"""One rule says whether forecasting pays: what it takes against the waiting that it removes.

Both are measured in decode steps, live or simulated. A prefetched expert removes at most the time
of its transfer. Where that is far more than forecasts take, or less, nothing needs to be tried.
Else a few steps without forecasts show how long they wait, and how much transfers next to it slow
the computation.

How many bytes to prefetch is not decided here: bounding them by bandwidth x time to the target
layer was tried and lost 5 to 12 % (benchmarks/README.md, moecast), because an expert that has
arrived in part is a join and not a miss, and the rest is dropped when the layer is routed.
"""

import logging
import statistics
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

from runtime.policy.device_cache import DeviceCache
from runtime.policy.tier import CacheTier

log = logging.getLogger(__name__)

SKIPPED, SKIPPED_OFF = 2, 1
"""First steps with forecasts, and without, that are not measured: what the other setting fetched is
still there, and a predictor that has missed tokens needs some."""
ON_STEPS, OFF_STEPS = 8, 4
"""Measured steps with forecasts, and without: with those skipped, 15 until the first decision."""
WATCHED = 32
"""Steps after which a decision is looked at again, without a trial."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096
"""Steps until a decision is tried again; doubles while it stays the same."""
CHANGE = 1.5
"""Ratio of needed bytes from which on other prompts are served than when it was decided."""
SURE = 4.0
"""Ratio of the time of hidden transfers to that of forecasts from which on no trial is needed. Of
the former, a third is lost at most: on two processors a computation next to reads ran at two thirds
of its speed."""
CLEAR = 2.0
"""Ratio of the time of forecasts to that of hidden transfers that half of the steps show, too."""
SAVED_BY_EVICTION = 0.25
"""Share of the bytes moved that eviction by predicted reuse saves at most. On the reference model
it moved a seventh to a fifth fewer than LRU."""
SAVED_WAITS = 0.5
"""Time that eviction by predicted reuse saves at most, as a share of the time that steps wait with
it. On the reference model at 10, 25, 50 % they waited 1.0, 1.5, 1.2 times as long without it. Where
prefetching hides nearly all transfers, moving fewer bytes saves next to nothing."""


class Forecaster(Protocol):
    """Makes forecasts and predictions of reuse; times are totals that a step was given to them."""

    uses_forecasts: bool
    """Whether it makes forecasts in the steps to come."""
    predicts_reuse: bool
    """Whether it predicts reuse in the steps to come."""

    @property
    def inline_seconds(self) -> float: ...

    @property
    def reuse_seconds(self) -> float: ...


class Link(Protocol):
    @property
    def tier(self) -> CacheTier: ...

    @property
    def busy_seconds(self) -> float: ...


class Transfers(Protocol):
    """The transfers of a model; times are totals."""

    @property
    def stall_seconds(self) -> float: ...

    @property
    def links(self) -> Sequence[Link]: ...


class StepCosts(NamedTuple):
    """The costs of a decode step, or of several on average; times are in seconds."""

    stall: float
    """Time that it waited for experts."""
    link: float
    """Time of all transfers."""
    forecast: float
    reuse: float
    """Time of forecasts, and of predictions of reuse."""
    moved_bytes: float
    prefetched_bytes: float
    used_bytes: float
    """Bytes of all transfers, of those begun by forecasts, and of the latter's that it needed."""
    computing: float
    """The rest of its time."""

    @classmethod
    def mean(cls, steps: Sequence["StepCosts"]) -> "StepCosts":
        """Returns the means, and the median of the rest, in which a machine's jitter is."""
        columns = list(zip(*steps, strict=True))
        return cls._make([*map(statistics.fmean, columns[:-1]), statistics.median(columns[-1])])

    @property
    def needed_bytes(self) -> float:
        """Bytes that a step without forecasts would have moved."""
        return self.moved_bytes - self.prefetched_bytes + self.used_bytes

    @property
    def hidden(self) -> float:
        """Time of the transfers that forecasts began and the step needed."""
        return self.link * min(1.0, self.used_bytes / self.moved_bytes) if self.moved_bytes else 0.0

    @property
    def is_in_vain(self) -> bool:
        """Whether forecasts, if there were any, hid no more time than they took."""
        is_made = self.forecast or self.prefetched_bytes
        return bool(is_made) and self.hidden <= self.forecast

    def gain_over(self, off: "StepCosts") -> float:
        """Returns the time that these steps' forecasts save, compared with steps without any."""
        needed = self.needed_bytes / off.needed_bytes if off.needed_bytes else 0.0
        slowed = self.computing - off.computing
        return needed * off.stall - self.stall - self.forecast - slowed

    def is_like(self, other: "StepCosts") -> bool:
        """Returns whether about as many bytes are needed."""
        least, most = sorted([self.needed_bytes, other.needed_bytes])
        return most <= CHANGE * least


Costs = Generator[None, StepCosts, StepCosts]
"""Runs through some decode steps, is sent what each took, and returns the mean."""


class ForecastPayoff:
    """Turns forecasting on and off, and predictions of reuse.

    Idle links prefetch only while it is on, too, if the system prefetches then.
    """

    def __init__(self, driver: Forecaster, cache: DeviceCache, loop: Transfers):
        self.num_switches = 0
        """Decisions that differ from the one before."""
        self._driver = driver
        self._cache = cache
        self._loop = loop
        self._totals: tuple[float, ...] = ()
        """Those with which the step began."""
        self._rule = self._decide()
        next(self._rule)

    @property
    def is_on(self) -> bool:
        """Whether forecasts are used in this step."""
        return self._driver.uses_forecasts

    def begin_step(self) -> None:
        """Begins a step; the cache counts it from here on."""
        self._totals = self._read_totals()

    def record_step(self, seconds: float) -> None:
        """Records the time of a decode step and chooses the setting of the next one."""
        parts = [b - a for a, b in zip(self._totals, self._read_totals(), strict=True)]
        stall, _, forecast, reuse, *_ = parts
        self._rule.send(StepCosts._make([*parts, seconds - stall - forecast - reuse]))

    def _read_totals(self) -> tuple[float, ...]:
        driver, counters = self._driver, self._cache.counters
        return (
            self._loop.stall_seconds,
            sum(link.busy_seconds for link in self._loop.links if link.tier.is_top),
            driver.inline_seconds,
            driver.reuse_seconds,
            sum(layer.bytes_moved for layer in counters),
            sum(layer.bytes_prefetched for layer in counters),
            sum(layer.bytes_used for layer in counters),
        )

    def _decide(self) -> Generator[None, StepCosts, None]:
        chosen, pause = True, FIRST_PAUSE // 2
        off: StepCosts | None = None
        while True:
            on = yield from self._try_on()
            pays = not on.is_in_vain
            if pays and on.forecast and on.hidden <= SURE * on.forecast:
                off = off or (yield from self._try_off())
                pays = on.gain_over(off) > 0
            self._set(pays)
            pause = min(LONGEST_PAUSE, 2 * pause) if pays == chosen else FIRST_PAUSE
            if pays != chosen:
                chosen = pays
                self.num_switches += 1
                log.info(
                    "prefetching turned %s: forecasts take %.2f ms a token, transfers of %.2f ms "
                    "are hidden by them, steps wait for others %.2f ms",
                    "on" if pays else "off",
                    *(1e3 * seconds for seconds in (on.forecast, on.hidden, on.stall)),
                )
            stall = on.stall if pays else off.stall if off else on.stall + on.hidden
            saved = min(SAVED_BY_EVICTION * on.link, SAVED_WAITS * stall)
            self._driver.predicts_reuse = on.reuse <= saved
            off = yield from self._watch(on, pause)
            if off is not None and off.stall < on.forecast:  # the most that they could save
                off = yield from self._watch(off, LONGEST_PAUSE)

    def _try_on(self) -> Costs:
        self._set(True)
        self._driver.predicts_reuse = True
        yield from self._run(SKIPPED)
        half = yield from self._run(ON_STEPS // 2)
        if half.forecast > CLEAR * half.hidden:
            return half
        return StepCosts.mean([half, (yield from self._run(ON_STEPS // 2))])

    def _try_off(self) -> Costs:
        self._set(False)
        yield from self._run(SKIPPED_OFF)
        return (yield from self._run(OFF_STEPS))

    def _watch(
        self, decided: StepCosts, pause: int
    ) -> Generator[None, StepCosts, StepCosts | None]:
        """Keeps a decision for a pause, unless what is served changes.

        Returns the last steps without forecasts; None: they were with forecasts.
        """
        for _ in range(pause // WATCHED):
            now = yield from self._run(WATCHED)
            if not now.is_like(decided) or (self.is_on and now.is_in_vain):
                break
        return None if self.is_on else now

    def _run(self, num_steps: int) -> Costs:
        steps = []
        for _ in range(num_steps):
            steps.append((yield))
        return StepCosts.mean(steps)

    def _set(self, is_on: bool) -> None:
        if is_on != self.is_on:
            self._driver.uses_forecasts = is_on
            if self._cache.system.idle_prefetch:
                self._cache.set_idle_prefetch(is_on)
