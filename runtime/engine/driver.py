"""Passes a model's events to its predictors, and their forecasts to the policy core."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from predictors.base import Floats, Forecasts, Ints, Predictor, Signal
from runtime.engine.forecasters import LearnedStore
from runtime.engine.predictor_drift import DriftMonitor, DriftReport, SampledStep
from runtime.engine.predictor_guard import PredictorGuard
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.transfer.loop import TimelineSink


class PredictorDriver:
    """Runs the predictors on the model's thread, at the model's events.

    The predictor gets all events in their order, a router's input when its layer's experts have
    been requested: what is missing is then on its way. Its forecasts are scheduled as soon as they
    are made. The reuse predictor runs before a layer's requests evict other experts, or after them
    if they evict none.

    A step that begins with every expert resident has nothing to forecast: nobody is called.

    Args:
        predictor: None: nothing is forecast.
        scheduler: Gets the forecasts.
        reuse_predictor: None: eviction uses its own counts.
        learned: Keeps what the predictor learns.
        drift: Compares its accuracy with its card; None: there is nothing to compare with.
    """

    def __init__(
        self,
        predictor: Predictor | None,
        scheduler: ForecastScheduler,
        reuse_predictor: Predictor | None = None,
        *,
        learned: LearnedStore | None = None,
        drift: DriftMonitor | None = None,
    ):
        self._learned = learned
        self._drift = drift
        self._sample: SampledStep | None = None
        """The step, if it is sampled."""
        self._guard = PredictorGuard(
            predictor, role="predictor", consequence="experts are fetched on demand"
        )
        self._reuse_guard = PredictorGuard(
            reuse_predictor, role="reuse predictor", consequence="eviction goes by usage counts"
        )
        self._scheduler = scheduler
        self.timeline: TimelineSink | None = None
        """Gets the times of predictions."""
        self._is_paused = False
        self._num_tokens = 0
        """Tokens of the step."""
        self._heard, self._reuse_heard = find_heard(predictor), find_heard(reuse_predictor)
        self.heard = self._heard | self._reuse_heard
        """Signals to capture, each with its layer."""
        self._gate_TD: Floats | None = None
        """Input of the router that has just run."""
        self._is_unscored = False
        """Whether the reuse predictor has yet to see the routing of the last layer."""
        self._is_forecasting = self._is_scoring = False
        """Whether the predictor, and the reuse predictor, get this step's events."""
        self._has_begun = False
        """Whether the predictor's `begin_step` ran for this step."""
        self.uses_forecasts = True
        """Whether the predictor, if there is one, gets all events of the steps to come."""
        self.predicts_reuse = True
        """Whether the reuse predictor, if there is one, gets the events of the steps to come."""
        self.inline_seconds = 0.0
        """Total time of forecasts and their scheduling."""

    @property
    def predictor(self) -> Predictor | None:
        """The predictor; None while it is paused and after it has failed, too."""
        return None if self._is_paused else self._guard.predictor

    @property
    def seconds(self) -> float:
        """Total time of the predictor, without the reuse predictor."""
        return self._guard.seconds

    @property
    def reuse_seconds(self) -> float:
        """Total time of the reuse predictor."""
        return self._reuse_guard.seconds

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

    @property
    def drift_report(self) -> DriftReport | None:
        """None where there is no card to compare with."""
        return None if self._drift is None else self._drift.report

    def begin_step(self, tokens_T: Ints, requests_T: Ints, *, is_decode: bool = False) -> None:
        """Begins a step; `is_decode`: every request has one token, and none of them is its first.

        Only such steps are compared with the card.
        """
        self._num_tokens = len(tokens_T)
        is_needed = self._learned is not None or not self._scheduler.cache.is_complete
        self._is_scoring = (
            is_needed and self.predicts_reuse and self._reuse_guard.predictor is not None
        )
        self._is_forecasting = is_needed and self.predictor is not None
        if self._is_scoring:
            self._call_reuse("begin_step", tokens_T, requests_T)
        is_fed = self._is_forecasting and self.uses_forecasts
        if self._drift is not None:
            self._sample = self._drift.begin_step(is_decode=is_decode, is_fed=is_fed)
        if not self._is_forecasting:
            return
        self._send("begin_step", tokens_T, requests_T)
        self._has_begun = True
        # While it is off, it gets only the beginnings and ends of steps.
        self._is_forecasting = is_fed

    @property
    def hears_routing(self) -> bool:
        """Whether a predictor, or the comparison with its card, uses this step's routing."""
        return self._is_forecasting or self._is_scoring or self._sample is not None

    def listens(self, signal: Signal, layer: int) -> bool:
        """Returns whether a predictor uses this hidden state of this layer in this step."""
        event = signal, layer
        return (self._is_forecasting and event in self._heard) or (
            self._is_scoring and event in self._reuse_heard
        )

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._is_forecasting and (Signal.LAYER_INPUT, layer) in self._heard:
            self._send("layer_input", layer, hidden_TD, layer=layer, layer_now=layer)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        """Keep a router's input until `routed`; `before_request` of its layer comes next."""
        self._gate_TD = hidden_TD
        if self._is_scoring and (Signal.GATE_INPUT, layer) in self._reuse_heard:
            self._call_reuse("gate_input", layer, hidden_TD)

    def before_request(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, experts: Collection[int]
    ) -> None:
        """Handle a layer's routing before its experts, the distinct ones, are requested."""
        if self._sample is not None:
            self._sample.add_routing(layer, experts_TK)
        self._is_unscored = self._is_scoring
        if self._is_scoring and self._scheduler.cache.lacks(layer, experts):
            self._score_reuse(layer, experts_TK, logits_TE)

    def _score_reuse(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> None:
        self._is_unscored = False
        forecasts = self._call_reuse("routed", layer, experts_TK, logits_TE)
        if forecasts:
            for forecast in forecasts:
                self._scheduler.cache.on_reuse_scores(forecast.layer, forecast.scores_TE)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> None:
        """Handle a layer's routing after the requests of its experts."""
        hidden_TD, self._gate_TD = self._gate_TD, None
        if self._is_unscored:
            self._score_reuse(layer, experts_TK, logits_TE)
        if not self._is_forecasting:
            return
        if hidden_TD is not None and (Signal.GATE_INPUT, layer) in self._heard:
            self._send("gate_input", layer, hidden_TD, layer=layer, layer_now=layer + 1)
        if (Signal.ROUTED, layer) in self._heard:
            assert logits_TE is not None or (Signal.LOGITS, layer) not in self._heard
            self._send("routed", layer, experts_TK, logits_TE, layer=layer, layer_now=layer + 1)

    def end_step(self) -> None:
        if not self._has_begun:
            return
        self._has_begun = False
        self._send("end_step")
        if self._learned is not None and self._guard.predictor is not None:
            self._learned.step_ended(self._guard.predictor)
        if self._drift is not None and self._sample is not None:
            self._drift.add(self._sample)

    def close(self) -> None:
        """Save what the predictor learned. May be called twice."""
        if self._learned is not None and self._guard.predictor is not None:
            self._learned.save(self._guard.predictor)

    def _call_reuse(self, event: str, *args: Any) -> Forecasts:
        return self._reuse_guard.call(event, *args, num_tokens=self._num_tokens)

    def _send(self, event: str, *args: Any, layer: int = -1, layer_now: int = -1) -> None:
        """Pass an event to the predictor, and its forecasts to the scheduler.

        Args:
            event: Name of the predictor's method.
            args: Arguments of the method.
            layer: The layer that the event is of; -1: the beginning or the end of a step.
            layer_now: The first layer that a forecast can still be for.
        """
        start = time.perf_counter()
        forecasts = self._guard.call(event, *args, num_tokens=self._num_tokens)
        if self._sample is not None:
            self._sample.add_forecasts(forecasts, signal=event, layer=layer, layer_now=layer_now)
        if forecasts and self.uses_forecasts:
            self._scheduler.schedule(forecasts, layer_now=layer_now)
        end = time.perf_counter()
        self.inline_seconds += end - start
        if self.timeline is not None and event != "end_step":
            self.timeline.predicted(event, layer_now, start, end)


def find_heard(predictor: Predictor | None) -> frozenset[tuple[Signal, int]]:
    """Returns the signals that a predictor uses, each with its layer."""
    if predictor is None:
        return frozenset()
    layers = range(predictor.spec.num_layers)
    return frozenset((s, n) for s in predictor.signals for n in layers if predictor.listens(s, n))
