"""Shows a predictor the model's events and hands its forecasts to the planner, live."""

import time

from predictors.base import Floats, Forecasts, Ints, Predictor, Signal
from runtime.policy.planner import Planner
from runtime.tiers.worker import Worker


class PredictorDriver:
    """Runs the predictor on the model's thread; the worker's lock is held for the queue only.

    `seconds` adds up what the predictor cost.
    """

    def __init__(self, predictor: Predictor | None, planner: Planner, worker: Worker):
        self._predictor = predictor
        self._planner = planner
        self._worker = worker
        self.signals = frozenset() if predictor is None else predictor.signals
        self.seconds = 0.0

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        if self._predictor is None:
            return
        start = time.perf_counter()
        forecasts = self._predictor.begin_step(tokens_T, requests_T)
        self._plan(forecasts, layer_now=-1, start=start)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._predictor is None or Signal.LAYER_INPUT not in self.signals:
            return
        start = time.perf_counter()
        self._plan(self._predictor.layer_input(layer, hidden_TD), layer_now=layer, start=start)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._predictor is None or Signal.GATE_INPUT not in self.signals:
            return
        start = time.perf_counter()
        self._plan(self._predictor.gate_input(layer, hidden_TD), layer_now=layer, start=start)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> None:
        if self._predictor is None or Signal.ROUTED not in self.signals:
            return
        assert logits_TE is not None
        start = time.perf_counter()
        # The layer itself is decided; what is forecast from here on concerns later ones.
        forecasts = self._predictor.routed(layer, experts_TK, logits_TE)
        self._plan(forecasts, layer_now=layer + 1, start=start)

    def end_step(self) -> None:
        if self._predictor is not None:
            self._predictor.end_step()

    def _plan(self, forecasts: Forecasts, *, layer_now: int, start: float) -> None:
        self.seconds += time.perf_counter() - start
        if not forecasts:
            return
        with self._worker.condition:
            self._planner.plan(forecasts, layer_now=layer_now)
            self._worker.condition.notify_all()
