"""Shows a reuse forecaster the model's events and tells the caches what to keep, live."""

import time

from predictors.base import Floats, Ints, Predictor
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
