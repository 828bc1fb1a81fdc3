"""Judges from a few steps whether predictors pay, where that needs no trial.

They are turned off where predicting takes longer than it saves at most, and stay on untried where
what they have surely saved is far more.

A prefetched expert saves its transfer, and better eviction a share of all transfers. Experts of a
few hundred KiB arrive sooner than a forecast is computed. The comparison of steps with and without
prefetching (`AdaptiveSwitch`) finds all that too, after some hundred tokens and from noisy times,
and where prefetching pays, its steps without it cost a twentieth of a short answer's time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.engine.driver import PredictorDriver
from runtime.policy.adaptive_switch import AdaptiveSwitch
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.transfer.worker import TransferWorker

log = logging.getLogger(__name__)

FIRST_STEPS, MEASURED_STEPS = 12, 16
"""Decode steps of a measurement, with the predictors on. The first one ends before steps are
compared."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096
"""Decode steps from one measurement to the next; doubles each time."""
SLOWED = 1 / 3
"""Share of the time of a transfer that a computation beside it loses at most. On two processors it
ran at two thirds of its speed during reads."""
SURE = 2.0
"""Ratio of the time that hidden transfers have saved to the time of forecasts, from which on no
trial is needed."""
SAVED_BY_EVICTION = 0.25
"""Share of the bytes moved that eviction by predicted reuse saves at most. On the reference model
it moved a seventh to a fifth fewer than LRU."""
SAVED_WAITS = 1.0
"""Time that eviction by predicted reuse saves at most, as a share of the time that steps wait with
it. On the reference model at 25, 50 and 75 % they waited 1.4 to 1.8 times as long without it. Where
prefetching hides nearly all transfers, moving fewer bytes saves next to nothing."""


@dataclass(frozen=True)
class _Totals:
    """Sums since the model was loaded."""

    counters: CacheCounters
    link_seconds: float
    """Time of all transfers, and the time during which one was running at least."""
    busy_seconds: float
    predictor_seconds: float
    """On the model's thread."""
    forecast_seconds: float
    """On any thread."""
    reuse_seconds: float
    stall_seconds: float


class ForecastPayoff:
    """Compares now and then what the predictors take with what they can have saved.

    Only predictors on the model's thread are turned off: on another one they delay no step.

    Args:
        driver: Runs the predictors, with or without those of reuse.
        adaptive: Is turned off when prefetching cannot pay.
        workers: Move bytes to the computing tiers.
        counters: Returns the counters of the computing tiers.
        stall_seconds: Returns the time that steps have waited for experts.
    """

    def __init__(
        self,
        driver: PredictorDriver,
        adaptive: AdaptiveSwitch,
        workers: Sequence[TransferWorker],
        counters: Callable[[], Sequence[CacheCounters]],
        stall_seconds: Callable[[], float],
    ):
        self._driver = driver
        self._adaptive = adaptive
        self._workers = workers
        self._counters = counters
        self._stall_seconds = stall_seconds
        self._before: _Totals | None = None
        """When the present measurement began; None between two."""
        self._num_steps = FIRST_STEPS
        self._pause = FIRST_PAUSE
        self._steps_left = 1

    def record_step(self) -> None:
        """Count a decode step, and begin or end a measurement when it is time."""
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        if self._before is None:
            self._driver.predicts_reuse = True
            self._before, self._steps_left = self._read_totals(), self._num_steps
            return
        self._judge(self._before, self._read_totals())
        self._num_steps = MEASURED_STEPS
        self._before, self._steps_left = None, self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)

    def _read_totals(self) -> _Totals:
        return _Totals(
            sum_counters(self._counters()),
            sum(worker.busy_seconds for worker in self._workers),
            sum(worker.occupied_seconds for worker in self._workers),
            self._driver.inline_seconds,
            max(self._driver.inline_seconds, self._driver.seconds),
            self._driver.reuse_seconds,
            self._stall_seconds(),
        )

    def _judge(self, before: _Totals, after: _Totals) -> None:
        num_steps = self._num_steps
        moved = after.counters.bytes_moved - before.counters.bytes_moved
        used = after.counters.bytes_used - before.counters.bytes_used
        prefetched = after.counters.bytes_prefetched - before.counters.bytes_prefetched
        link_seconds = after.link_seconds - before.link_seconds
        predictor_seconds = after.predictor_seconds - before.predictor_seconds
        forecast_seconds = after.forecast_seconds - before.forecast_seconds
        reuse_seconds = after.reuse_seconds - before.reuse_seconds
        stall_seconds = after.stall_seconds - before.stall_seconds
        most_seconds = link_seconds * used / moved if moved else 0.0
        # Of the transfers that a step would have waited for without forecasts, those it did not.
        needed = min(1.0, (moved - prefetched + used) / moved) if moved else 0.0
        hidden_seconds = needed * (after.busy_seconds - before.busy_seconds) - stall_seconds
        if self._adaptive.is_on and most_seconds < predictor_seconds:
            self._adaptive.turn_off(
                f"forecasts took {1e3 * predictor_seconds / num_steps:.2f} ms a token and "
                f"saved at most {1e3 * most_seconds / num_steps:.2f} ms"
            )
        elif (1 - SLOWED) * hidden_seconds > SURE * forecast_seconds:
            self._adaptive.put_off_comparison()
        saved_seconds = min(SAVED_BY_EVICTION * link_seconds, SAVED_WAITS * stall_seconds)
        if saved_seconds < reuse_seconds:
            self._driver.predicts_reuse = False
            log.info(
                "eviction by usage counts for the next %d tokens: predicting reuse took %.2f ms a "
                "token and saved at most %.2f ms",
                self._pause,
                1e3 * reuse_seconds / num_steps,
                1e3 * saved_seconds / num_steps,
            )
