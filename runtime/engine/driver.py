"""Shows a predictor the model's events and hands its forecasts to the scheduler, live."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from predictors.base import Floats, Forecasts, Ints, Predictor, Signal
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.multi_device_cache import DeviceCaches
from runtime.transfer.worker import TransferState


class ReuseDriver:
    """Runs the forecaster on the model's thread, just before a layer asks for its experts: it is
    then that others are dropped. `seconds` adds up what it cost.
    """

    def __init__(self, forecaster: Predictor, cache: DeviceCaches, shared: TransferState):
        self._forecaster = forecaster
        self._cache = cache
        self._shared = shared
        self.kind = forecaster.kind
        self.signals = forecaster.signals
        self.seconds = 0.0

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._forecaster.begin_step(tokens_T, requests_T)

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self._forecaster.gate_input(layer, hidden_TD)

    def routed(self, layer: int, experts_TK: Ints) -> None:
        start = time.perf_counter()
        values = self._forecaster.routed(layer, experts_TK, None)
        self.seconds += time.perf_counter() - start
        with self._shared.condition:
            for one in values:
                self._cache.on_reuse_scores(one.layer, one.scores_TE[0])


class PredictorDriver:
    """Runs the predictor on the model's thread; the workers' lock is held for the queue only.

    `seconds` adds up what the predictor cost.
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
        self._keeper = reuse_predictor
        self.signals = frozenset() if predictor is None else predictor.signals
        """What the predictor is shown."""
        self.all_signals = self.signals | (
            frozenset() if reuse_predictor is None else reuse_predictor.signals
        )
        """What must be captured: the keeper's too."""
        self.seconds = 0.0

    @property
    def predictor(self) -> Predictor | None:
        """What it forecasts with."""
        return self._predictor

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is forecast and nothing learned: what is computed meanwhile is no request."""
        predictor, self._predictor = self._predictor, None
        try:
            yield
        finally:
            self._predictor = predictor

    @property
    def forecasts_with(self) -> str | None:
        """The predictor's kind, if there is one."""
        return None if self._predictor is None else self._predictor.kind

    @property
    def keeps_by(self) -> str | None:
        """The kind of the forecaster behind eviction, if there is one."""
        return None if self._keeper is None else self._keeper.kind

    def _listens(self, signal: Signal) -> bool:
        """Whether the predictor is to see an event.

        While forecasts are not wanted it costs nothing: one that keeps a state misses those steps,
        but hears of every request.
        """
        return (
            self._predictor is not None and signal in self.signals and self._scheduler.prefetching
        )

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        if self._keeper is not None:
            self._keeper.begin_step(tokens_T, requests_T)
        if self._predictor is not None:
            start = time.perf_counter()
            forecasts = self._predictor.begin_step(tokens_T, requests_T)
            self._plan(forecasts, layer_now=-1, start=start, event="begin_step")

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._listens(Signal.LAYER_INPUT):
            assert self._predictor is not None
            start = time.perf_counter()
            forecasts = self._predictor.layer_input(layer, hidden_TD)
            self._plan(forecasts, layer_now=layer, start=start, event="layer_input")

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        if self._keeper is not None:
            self._keeper.gate_input(layer, hidden_TD)
        if self._listens(Signal.GATE_INPUT):
            assert self._predictor is not None
            start = time.perf_counter()
            forecasts = self._predictor.gate_input(layer, hidden_TD)
            self._plan(forecasts, layer_now=layer, start=start, event="gate_input")

    def before_demand(self, layer: int, experts_TK: Ints) -> None:
        """The layer's router has spoken, and none of its experts has been asked for yet."""
        if self._keeper is not None:
            self._keeper.routed(layer, experts_TK)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> None:
        if self._listens(Signal.ROUTED):
            assert self._predictor is not None
            assert logits_TE is not None or Signal.LOGITS not in self.signals
            start = time.perf_counter()
            # The layer itself is decided; what is forecast from here on concerns later ones.
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
