"""Passes a model's events to its predictors, and their forecasts to the policy core."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from predictors.base import Floats, Forecasts, Ints, Predictor, Signal
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.transfer.worker import TransferState


class PredictorDriver:
    """Runs predictors on the model's thread; holds the workers' lock only to schedule forecasts.

    The reuse predictor runs before a layer's requests evict other experts.
    """

    def __init__(
        self,
        predictor: Predictor | None,
        scheduler: ForecastScheduler,
        shared: TransferState,
        reuse_predictor: Predictor | None = None,
    ):
        self.predictor = predictor
        """None while it is paused, too."""
        self._scheduler = scheduler
        self._shared = shared
        self._reuse_predictor = reuse_predictor
        self._signals = frozenset() if predictor is None else predictor.signals
        self.all_signals = self._signals | (
            frozenset() if reuse_predictor is None else reuse_predictor.signals
        )
        """Signals to capture."""
        self.seconds = 0.0
        """Total time of the predictor, without the reuse predictor."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context nothing is forecast and nothing is learned."""
        predictor, self.predictor = self.predictor, None
        try:
            yield
        finally:
            self.predictor = predictor

    @property
    def predictor_kind(self) -> str | None:
        return None if self.predictor is None else self.predictor.kind

    @property
    def reuse_predictor_kind(self) -> str | None:
        return None if self._reuse_predictor is None else self._reuse_predictor.kind

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        if self._reuse_predictor is not None:
            self._reuse_predictor.begin_step(tokens_T, requests_T)
        if self.predictor is not None:
            self._forecast("begin_step", -1, self.predictor.begin_step, tokens_T, requests_T)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        if (predictor := self._listener(Signal.LAYER_INPUT)) is not None:
            self._forecast("layer_input", layer, predictor.layer_input, layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._reuse_predictor is not None:
            self._reuse_predictor.gate_input(layer, hidden_TD)
        if (predictor := self._listener(Signal.GATE_INPUT)) is not None:
            self._forecast("gate_input", layer, predictor.gate_input, layer, hidden_TD)

    def before_request(self, layer: int, experts_TK: Ints) -> None:
        """Handle a layer's routing before its experts are requested."""
        if self._reuse_predictor is not None:
            forecasts = self._reuse_predictor.routed(layer, experts_TK, None)
            with self._shared.condition:
                for forecast in forecasts:
                    self._scheduler.cache.on_reuse_scores(forecast.layer, forecast.scores_TE[0])

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> None:
        if (predictor := self._listener(Signal.ROUTED)) is not None:
            assert logits_TE is not None or Signal.LOGITS not in self._signals
            # The layer itself is routed: forecasts are for later layers.
            self._forecast("routed", layer + 1, predictor.routed, layer, experts_TK, logits_TE)

    def end_step(self) -> None:
        if self.predictor is not None:
            self.predictor.end_step()

    def _listener(self, signal: Signal) -> Predictor | None:
        """Returns the predictor if it gets such events.

        While prefetching is off it gets none, except the beginnings and ends of steps.
        """
        return self.predictor if signal in self._signals and self._scheduler.prefetching else None

    def _forecast(
        self, event: str, layer_now: int, handle: Callable[..., Forecasts], *args: Any
    ) -> None:
        start = time.perf_counter()
        forecasts = handle(*args)
        self.seconds += time.perf_counter() - start
        if forecasts and self._scheduler.prefetching:
            with self._shared.condition:
                self._scheduler.schedule(forecasts, layer_now=layer_now)
                self._shared.condition.notify_all()
        if self._shared.timeline is not None:
            self._shared.timeline.predicted(event, layer_now, start, time.perf_counter())
