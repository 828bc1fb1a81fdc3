"""Calls a predictor so that nothing it does can end or change an answer."""

import logging
import time
from typing import Any

import numpy as np

from predictors.base import ConsecutiveForecasts, Forecast, Forecasts, Predictor
from predictors.errors import describe_error
from predictors.networks import kernels
from predictors.spec import ModelSpec

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 1.0
"""Processor time of one call, a thousand times what a predictor takes for a token."""
DEADLINE_SECONDS_PER_TOKEN = 2e-3
MAX_SLOW_CALLS = 3
"""Calls over the deadline after which the predictor is not called again: one may be bad luck. The
first one by the clock is not counted."""


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
        self._is_watched = False
        """A call has taken longer than the deadline by the clock: processor time is measured."""
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
        # On a busy machine the clock says nothing about the predictor, but it costs less to read.
        processor_start = time.thread_time() if self._is_watched else 0.0
        start = time.perf_counter()
        try:
            forecasts = getattr(self.predictor, event)(*args) or ()
            check_forecasts(forecasts, self.predictor.spec)
        except Exception as error:  # whatever a predictor raises, answers do not depend on it
            self.turn_off(describe_error(error))
            return ()
        finally:
            seconds = time.perf_counter() - start
            self.seconds += seconds
        if seconds > DEADLINE_SECONDS:
            deadline = DEADLINE_SECONDS + DEADLINE_SECONDS_PER_TOKEN * num_tokens
            if self._is_watched and (taken := time.thread_time() - processor_start) > deadline:
                self._count_slow_call(taken)
            self._is_watched = True
        return forecasts

    def _count_slow_call(self, seconds: float) -> None:
        self._num_slow += 1
        if self._num_slow == MAX_SLOW_CALLS:
            self.turn_off(f"{MAX_SLOW_CALLS} calls took too long, the last one {seconds:.1f} s")

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


def check_forecasts(forecasts: Forecasts, spec: ModelSpec) -> None:
    """Raise InvalidForecast unless the forecasts are of the predictor's model."""
    if type(forecasts) is ConsecutiveForecasts:
        _check_layer(forecasts.first_layer, spec)
        _check_scores(forecasts.scores_THE, spec, dimensions=3)
        _check_layer(forecasts.first_layer + len(forecasts) - 1, spec)
        return
    for forecast in forecasts:
        if not isinstance(forecast, Forecast):
            raise InvalidForecast(f"{type(forecast).__name__} in place of a forecast")
        _check_layer(forecast.layer, spec)
        _check_scores(forecast.scores_TE, spec, dimensions=2)
        if forecast.priority_E is not None:
            _check_scores(forecast.priority_E, spec, dimensions=1)
        wanted = forecast.wanted or ()
        if not all(0 <= e < spec.num_experts for e in wanted):
            raise InvalidForecast(f"experts {list(wanted)} of {spec.num_experts}")


def _check_layer(layer: int, spec: ModelSpec) -> None:
    if not 0 <= layer < spec.num_layers:
        raise InvalidForecast(f"layer {layer} of {spec.num_layers}")


def _check_scores(array: Any, spec: ModelSpec, *, dimensions: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidForecast(f"scores of type {kind}; expected an array of floats")
    if array.ndim != dimensions or array.shape[-1] != spec.num_experts:
        raise InvalidForecast(f"scores of shape {array.shape} for {spec.num_experts} experts")
    if kernels is not None and array.dtype == np.float32:
        is_finite = kernels.are_finite(array)
    else:
        is_finite = bool(np.isfinite(array).all())
    if not is_finite:
        raise InvalidForecast("scores that are not finite")
