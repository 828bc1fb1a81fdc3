"""Passes a model's events to its predictors, and their forecasts to the policy core."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from predictors.base import Floats, Forecasts, Ints, Predictor, Signal
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.multi_device_cache import DeviceCaches
from runtime.transfer.worker import TransferState


class ReuseDriver:
    """Runs a reuse predictor on the model's thread, before a layer's requests evict other experts.

    `seconds` is the predictor's total time.
    """

    def __init__(self, predictor: Predictor, cache: DeviceCaches, shared: TransferState):
        self._predictor = predictor
        self._cache = cache
        self._shared = shared
        self.kind = predictor.kind
        self.signals = predictor.signals
        self.seconds = 0.0

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._predictor.begin_step(tokens_T, requests_T)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self._predictor.gate_input(layer, hidden_TD)

    def routed(self, layer: int, experts_TK: Ints) -> None:
        start = time.perf_counter()
        forecasts = self._predictor.routed(layer, experts_TK, None)
        self.seconds += time.perf_counter() - start
        with self._shared.condition:
            for forecast in forecasts:
                self._cache.on_reuse_scores(forecast.layer, forecast.scores_TE[0])


class PredictorDriver:
    """Runs the predictor on the model's thread; holds the workers' lock only to schedule forecasts.

    `seconds` is the predictor's total time.
    """

    def __init__(
        self,
        predictor: Predictor | None,
        scheduler: ForecastScheduler,
        shared: TransferState,
        reuse_predictor: ReuseDriver | None = None,
    ):
        self._predictor = predictor
        self._scheduler = scheduler
        self._shared = shared
        self._reuse_driver = reuse_predictor
        self.signals = frozenset() if predictor is None else predictor.signals
        """Signals of the predictor."""
        self.all_signals = self.signals | (
            frozenset() if reuse_predictor is None else reuse_predictor.signals
        )
        """Signals to capture, those of the reuse predictor included."""
        self.seconds = 0.0

    @property
    def predictor(self) -> Predictor | None:
        return self._predictor

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context nothing is forecast and nothing is learned."""
        predictor, self._predictor = self._predictor, None
        try:
            yield
        finally:
            self._predictor = predictor

    @property
    def predictor_kind(self) -> str | None:
        return None if self._predictor is None else self._predictor.kind

    @property
    def reuse_predictor_kind(self) -> str | None:
        return None if self._reuse_driver is None else self._reuse_driver.kind

    def _uses(self, signal: Signal) -> bool:
        """Return whether the predictor gets an event.

        While prefetching is off it gets none, except the beginnings and ends of steps.
        """
        return (
            self._predictor is not None and signal in self.signals and self._scheduler.prefetching
        )

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        if self._reuse_driver is not None:
            self._reuse_driver.begin_step(tokens_T, requests_T)
        if self._predictor is not None:
            start = time.perf_counter()
            forecasts = self._predictor.begin_step(tokens_T, requests_T)
            self._plan(forecasts, layer_now=-1, start=start, event="begin_step")

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._uses(Signal.LAYER_INPUT):
            assert self._predictor is not None
            start = time.perf_counter()
            forecasts = self._predictor.layer_input(layer, hidden_TD)
            self._plan(forecasts, layer_now=layer, start=start, event="layer_input")

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._reuse_driver is not None:
            self._reuse_driver.gate_input(layer, hidden_TD)
        if self._uses(Signal.GATE_INPUT):
            assert self._predictor is not None
            start = time.perf_counter()
            forecasts = self._predictor.gate_input(layer, hidden_TD)
            self._plan(forecasts, layer_now=layer, start=start, event="gate_input")

    def before_request(self, layer: int, experts_TK: Ints) -> None:
        """Handle a layer's routing before its experts are requested."""
        if self._reuse_driver is not None:
            self._reuse_driver.routed(layer, experts_TK)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> None:
        if self._uses(Signal.ROUTED):
            assert self._predictor is not None
            assert logits_TE is not None or Signal.LOGITS not in self.signals
            start = time.perf_counter()
            # The layer itself is routed: forecasts are for later layers.
            forecasts = self._predictor.routed(layer, experts_TK, logits_TE)
            self._plan(forecasts, layer_now=layer + 1, start=start, event="routed")

    def end_step(self) -> None:
        if self._predictor is not None:
            self._predictor.end_step()

    def _plan(self, forecasts: Forecasts, *, layer_now: int, start: float, event: str) -> None:
        end = time.perf_counter()
        self.seconds += end - start
        if forecasts and self._scheduler.prefetching:
            with self._shared.condition:
                self._scheduler.schedule(forecasts, layer_now=layer_now)
                self._shared.condition.notify_all()
        if self._shared.timeline is not None:
            self._shared.timeline.predicted(event, layer_now, start, time.perf_counter())
