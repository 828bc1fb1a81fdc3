"""One rule says whether forecasting pays: what it takes against the waiting that it removes.

Both are measured in decode steps. A prefetched expert removes at most the time of its transfer.
Where that is far more than forecasts take, or less, nothing needs to be tried. Else a few steps
without forecasts show how long they wait, and how much transfers next to it slow the computation.
"""

import logging
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from runtime.engine.driver import PredictorDriver
from runtime.policy.counters import CacheCounters

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
SAVED_WAITS = 1.0
"""Time that eviction by predicted reuse saves at most, as a share of the time that steps wait with
it. On the reference model at 25, 50 and 75 % they waited 1.4 to 1.8 times as long without it. Where
prefetching hides nearly all transfers, moving fewer bytes saves next to nothing."""


class StepParts(NamedTuple):
    """What a step took; times are in seconds."""

    seconds: float
    stall: float
    link: float
    forecast: float
    reuse: float
    bytes_moved: float
    bytes_prefetched: float
    bytes_used: float


@dataclass(frozen=True)
class StepSample:
    """Means of some decode steps; times are in seconds."""

    needed_bytes: float
    """Bytes that steps without forecasts would have moved."""
    hidden: float
    """Time of the transfers that forecasts have begun and steps have used."""
    link: float
    """Time of all transfers."""
    stall: float
    """Time that steps have waited for experts."""
    forecast: float
    reuse: float
    """Time of forecasts, and of predictions of reuse."""
    computing: float
    """Median of the rest of a step."""

    @classmethod
    def of(cls, steps: Sequence[StepParts]) -> Self:
        mean = StepParts(*(statistics.fmean(column) for column in zip(*steps, strict=True)))
        used_share = min(1.0, mean.bytes_used / mean.bytes_moved) if mean.bytes_moved else 0.0
        return cls(
            needed_bytes=mean.bytes_moved - mean.bytes_prefetched + mean.bytes_used,
            hidden=mean.link * used_share,
            link=mean.link,
            stall=mean.stall,
            forecast=mean.forecast,
            reuse=mean.reuse,
            computing=statistics.median(
                one.seconds - one.stall - one.forecast - one.reuse for one in steps
            ),
        )

    def gain_over(self, off: "StepSample") -> float:
        """Returns the time that these steps' forecasts save, compared with steps without any."""
        needed = self.needed_bytes / off.needed_bytes if off.needed_bytes else 0.0
        slowed = self.computing - off.computing
        return needed * off.stall - self.stall - self.forecast - slowed

    def is_like(self, other: "StepSample") -> bool:
        """Returns whether about as many bytes are needed."""
        least, most = sorted([self.needed_bytes, other.needed_bytes])
        return most <= CHANGE * least


Steps = Generator[None, StepParts, list[StepParts]]
"""Runs through decode steps, and is sent the parts of each."""


class ForecastPayoff:
    """Turns forecasting on and off, and predictions of reuse.

    Args:
        driver: Runs the predictors.
        counters: Returns the counters of the computing tiers.
        link_seconds: Returns the time of all transfers to these.
        stall_seconds: Returns the time that steps have waited for experts.
        on_change: Called with the setting whenever it changes.
    """

    def __init__(
        self,
        driver: PredictorDriver,
        *,
        counters: Callable[[], Sequence[CacheCounters]],
        link_seconds: Callable[[], float],
        stall_seconds: Callable[[], float],
        on_change: Callable[[bool], None] = lambda _: None,
    ):
        self.num_switches = 0
        """Decisions that differ from the one before."""
        self._driver = driver
        self._counters = counters
        self._link_seconds = link_seconds
        self._stall_seconds = stall_seconds
        self._on_change = on_change
        self._totals = self._read_totals()
        self._rule = self._decide()
        next(self._rule)

    @property
    def is_on(self) -> bool:
        """Whether forecasts are used in this step."""
        return self._driver.uses_forecasts

    def record_step(self, seconds: float, *, is_decode: bool) -> None:
        """Records the time of a step; after one of decoding, chooses the setting of the next."""
        before, self._totals = self._totals, self._read_totals()
        if is_decode:
            parts = (b - a for a, b in zip(before, self._totals, strict=True))
            self._rule.send(StepParts(seconds, *parts))

    def _read_totals(self) -> tuple[float, ...]:
        driver, counters = self._driver, self._counters()
        return (
            self._stall_seconds(),
            self._link_seconds(),
            driver.inline_seconds,
            driver.reuse_seconds,
            sum(layer.bytes_moved for layer in counters),
            sum(layer.bytes_prefetched for layer in counters),
            sum(layer.bytes_used for layer in counters),
        )

    def _decide(self) -> Generator[None, StepParts, None]:
        chosen, pause = True, FIRST_PAUSE // 2
        off: StepSample | None = None
        while True:
            on = yield from self._try_on()
            pays = not on.forecast or on.hidden > SURE * on.forecast
            if not pays and on.hidden > on.forecast:
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
            self._decide_reuse(on, pause)
            off = yield from self._watch(on, pause)
            if off is not None and off.stall < on.forecast:  # the most that they could save
                off = yield from self._watch(off, LONGEST_PAUSE)

    def _try_on(self) -> Generator[None, StepParts, StepSample]:
        self._set(True)
        self._driver.predicts_reuse = True
        yield from self._run(SKIPPED)
        steps = yield from self._run(ON_STEPS // 2)
        half = StepSample.of(steps)
        if half.forecast < CLEAR * half.hidden or not half.forecast:
            steps += yield from self._run(ON_STEPS // 2)
        return StepSample.of(steps)

    def _try_off(self) -> Generator[None, StepParts, StepSample]:
        self._set(False)
        yield from self._run(SKIPPED_OFF)
        return StepSample.of((yield from self._run(OFF_STEPS)))

    def _decide_reuse(self, on: StepSample, pause: int) -> None:
        saved = min(SAVED_BY_EVICTION * on.link, SAVED_WAITS * on.stall)
        self._driver.predicts_reuse = on.reuse <= saved
        if on.reuse > saved:
            log.info(
                "eviction by usage counts for the next %d tokens: predicting reuse took %.2f ms a "
                "token and saved at most %.2f ms",
                pause,
                1e3 * on.reuse,
                1e3 * saved,
            )

    def _watch(
        self, decided: StepSample, pause: int
    ) -> Generator[None, StepParts, StepSample | None]:
        """Keeps a decision for a pause, unless what is served changes.

        Returns the last steps without forecasts; None: they were with forecasts.
        """
        for _ in range(pause // WATCHED):
            sample = StepSample.of((yield from self._run(WATCHED)))
            if not sample.is_like(decided) or (self.is_on and sample.hidden < sample.forecast):
                break
        return None if self.is_on else sample

    def _run(self, num_steps: int) -> Steps:
        steps = []
        for _ in range(num_steps):
            steps.append((yield))
        return steps

    def _set(self, is_on: bool) -> None:
        if is_on != self.is_on:
            self._driver.uses_forecasts = is_on
            self._on_change(is_on)
