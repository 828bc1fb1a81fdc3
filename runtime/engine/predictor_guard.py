"""Calls a predictor so that nothing it does can end or change an answer."""

import logging
import math
import time
from typing import Any

import numpy as np

from predictors.base import Forecast, Forecasts, Predictor

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 1.0
"""Processor time of one call, a thousand times what a predictor takes for a token."""
DEADLINE_SECONDS_PER_TOKEN = 2e-3
MAX_SLOW_CALLS = 3
"""Calls over the deadline after which the predictor is not called again: one may be bad luck."""


class InvalidForecast(ValueError):
    """A forecast that does not fit the model."""


class PredictorGuard:
    """Turns a predictor off when it raises, takes too long, or returns what is not a forecast.

    Experts are then fetched when their routers request them; the output is the same. It runs on the
    model's thread: one that never returns is a step that never ends.

    Args:
        predictor: None: there is no predictor.
        role: What it does, for the log.
        consequence: What happens without it, for the log.
    """

    def __init__(self, predictor: Predictor | None, *, role: str, consequence: str):
        self.predictor = predictor
        """None after a failure, too."""
        self.failure: str | None = None
        """Why the predictor was turned off."""
        self.seconds = 0.0
        """Total time of its calls."""
        self._role = role
        self._consequence = consequence
        self._num_slow = 0

    def call(self, event: str, *args: Any, num_tokens: int) -> Forecasts:
        """Pass an event to the predictor; returns its forecasts, none if it fails.

        Args:
            event: Name of the predictor's method.
            args: Arguments of the method.
            num_tokens: Tokens of the step, to which the deadline is proportional.
        """
        if self.predictor is None:
            return ()
        start, processor_start = time.perf_counter(), time.thread_time()
        try:
            forecasts = getattr(self.predictor, event)(*args) or ()
            for forecast in forecasts:
                check_forecast(forecast, self.predictor)
        except Exception as error:  # whatever a predictor raises, answers do not depend on it
            self.turn_off(f"{type(error).__name__}: {error}")
            return ()
        finally:
            self.seconds += time.perf_counter() - start
        # Processor time: on a busy machine the clock says nothing about the predictor.
        processor_seconds = time.thread_time() - processor_start
        if processor_seconds > DEADLINE_SECONDS + DEADLINE_SECONDS_PER_TOKEN * num_tokens:
            self._num_slow += 1
            if self._num_slow == MAX_SLOW_CALLS:
                self.turn_off(
                    f"{MAX_SLOW_CALLS} calls took too long, the last one {processor_seconds:.1f} s"
                )
        return forecasts

    def turn_off(self, reason: str) -> None:
        """Ends the use of the predictor; does nothing if it is turned off already."""
        if self.predictor is None:
            return
        kind, self.predictor, self.failure = self.predictor.kind, None, reason
        log.warning(
            "the %s %s failed (%s): %s from now on; the output does not change. Load the model "
            "again to try it once more",
            self._role,
            kind,
            reason,
            self._consequence,
        )


def check_forecast(forecast: Forecast, predictor: Predictor) -> None:
    """Raise InvalidForecast unless the forecast is one of the predictor's model."""
    spec = predictor.spec
    if not isinstance(forecast, Forecast):
        raise InvalidForecast(f"{type(forecast).__name__} in place of a forecast")
    if not 0 <= forecast.layer < spec.num_layers:
        raise InvalidForecast(f"layer {forecast.layer} of {spec.num_layers}")
    _check_array(forecast.scores_TE, spec.num_experts, dimensions=2)
    if forecast.priority_E is not None:
        _check_array(forecast.priority_E, spec.num_experts, dimensions=1)
    if forecast.wanted is not None and not all(0 <= e < spec.num_experts for e in forecast.wanted):
        raise InvalidForecast(f"experts {list(forecast.wanted)} of {spec.num_experts}")


def _check_array(array: Any, num_experts: int, *, dimensions: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidForecast(f"scores of type {kind}; expected an array of floats")
    if array.ndim != dimensions or array.shape[-1] != num_experts:
        raise InvalidForecast(f"scores of shape {array.shape} for {num_experts} experts")
    if not math.isfinite(array.sum()):  # probabilities: their sum cannot overflow
        raise InvalidForecast("scores that are not finite")
