"""The predictor of the bound: it knows all routing of a step when the step begins.

Shape suffixes: E experts.
"""

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.spec import ModelSpec
from runtime.config import ORACLE
from runtime.sim.routing import RecordedRouting


class OraclePredictor(Predictor):
    """Forecasts exactly what the routers of a step will choose.

    It answers `begin_step` with all layers, the nearest first, and each router with the later
    layers once more, whose experts may have been evicted since.
    """

    kind = ORACLE
    signals = frozenset({Signal.TOKENS, Signal.ROUTED})

    def __init__(self, spec: ModelSpec, future: RecordedRouting):
        super().__init__(spec)
        self._steps = iter(future)
        self._known: list[Forecast] = []
        """The routing of each of the step's layers."""

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._known = []
        for layer, chosen in enumerate(next(self._steps)):
            scores_1E = np.zeros((1, self.spec.num_experts), dtype=np.float32)
            scores_1E[0, chosen] = 1.0
            self._known.append(Forecast(layer, scores_1E, wanted=chosen))
        return self._known

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        return self._known[layer + 1 :]
