"""Passes a model's events to its predictors, and their forecasts to the policy core."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from predictors.base import Floats, Forecasts, Ints, Predictor, Signal
from runtime.engine.predictor_guard import PredictorGuard
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
        self._guard = PredictorGuard(
            predictor, role="predictor", consequence="experts are fetched on demand"
        )
        self._reuse_guard = PredictorGuard(
            reuse_predictor, role="reuse predictor", consequence="eviction goes by usage counts"
        )
        self._scheduler = scheduler
        self._shared = shared
        self._is_paused = False
        self._num_tokens = 0
        """Tokens of the step."""
        self._signals = frozenset() if predictor is None else predictor.signals
        self.all_signals = self._signals | (
            frozenset() if reuse_predictor is None else reuse_predictor.signals
        )
        """Signals to capture."""

    @property
    def predictor(self) -> Predictor | None:
        """The predictor; None while it is paused and after it has failed, too."""
        return None if self._is_paused else self._guard.predictor

    @property
    def seconds(self) -> float:
        """Total time of the predictor, without the reuse predictor."""
        return self._guard.seconds

    @property
    def failures(self) -> dict[str, str]:
        """Reasons why predictors were turned off, by `predictor` and `reuse_predictor`."""
        guards = {"predictor": self._guard, "reuse_predictor": self._reuse_guard}
        return {name: guard.failure for name, guard in guards.items() if guard.failure is not None}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context nothing is forecast and nothing is learned."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @property
    def predictor_kind(self) -> str | None:
        return None if self.predictor is None else self.predictor.kind

    @property
    def reuse_predictor_kind(self) -> str | None:
        predictor = self._reuse_guard.predictor
        return None if predictor is None else predictor.kind

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._num_tokens = len(tokens_T)
        self._call_reuse("begin_step", tokens_T, requests_T)
        if self.predictor is not None:
            self._forecast("begin_step", -1, tokens_T, requests_T)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._listens(Signal.LAYER_INPUT):
            self._forecast("layer_input", layer, layer, hidden_TD)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self._call_reuse("gate_input", layer, hidden_TD)
        if self._listens(Signal.GATE_INPUT):
            self._forecast("gate_input", layer, layer, hidden_TD)

    def before_request(self, layer: int, experts_TK: Ints) -> None:
        """Handle a layer's routing before its experts are requested."""
        forecasts = self._call_reuse("routed", layer, experts_TK, None)
        if forecasts:
            with self._shared.condition:
                for forecast in forecasts:
                    self._scheduler.cache.on_reuse_scores(forecast.layer, forecast.scores_TE[0])

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> None:
        if self._listens(Signal.ROUTED):
            assert logits_TE is not None or Signal.LOGITS not in self._signals
            # The layer itself is routed: forecasts are for later layers.
            self._forecast("routed", layer + 1, layer, experts_TK, logits_TE)

    def end_step(self) -> None:
        if self.predictor is not None:
            self._guard.call("end_step", num_tokens=self._num_tokens)

    def _listens(self, signal: Signal) -> bool:
        """Returns whether the predictor gets such events.

        While prefetching is off it gets none, except the beginnings and ends of steps.
        """
        return (
            signal in self._signals and self._scheduler.prefetching and self.predictor is not None
        )

    def _call_reuse(self, event: str, *args: Any) -> Forecasts:
        return self._reuse_guard.call(event, *args, num_tokens=self._num_tokens)

    def _forecast(self, event: str, layer_now: int, *args: Any) -> None:
        start = time.perf_counter()
        forecasts = self._guard.call(event, *args, num_tokens=self._num_tokens)
        if forecasts and self._scheduler.prefetching:
            with self._shared.condition:
                self._scheduler.schedule(forecasts, layer_now=layer_now)
                self._shared.condition.notify_all()
        if self._shared.timeline is not None:
            self._shared.timeline.predicted(event, layer_now, start, time.perf_counter())
