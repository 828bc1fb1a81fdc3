"""The popularity baseline: the experts that the trace used most, the same for every token.

With `ahead=1`, it is BrainStorm's "Traced-TopK" (MoE-Infinity (sequence level), section 8.3).
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal, check_options
from predictors.errors import PredictorError
from predictors.spec import ModelSpec
from predictors.tensors import read_tensors, write_tensors


class PopularityPredictor(Predictor):
    """Forecasts every layer at the start of the step, or the layer `ahead` of each routed one.

    Shape suffixes: L layers, E experts, T tokens.

    Args:
        shares_LE: share of the trace's tokens that layer l routed to expert e.
        ahead: layers that are forecast as each one is routed, and the first ones at the start
            of the step; None is all layers at the start of the step.
    """

    kind = "popularity"
    signals = frozenset({Signal.TOKENS})
    stateless = True

    def __init__(self, spec: ModelSpec, shares_LE: Floats, *, ahead: int | None = None):
        super().__init__(spec)
        assert shares_LE.shape == (spec.num_layers, spec.num_experts)
        if ahead is not None and ahead < 1:
            raise PredictorError(f"{self.kind} with ahead={ahead}: at least 1, or null for all")
        self.ahead = ahead
        if ahead is not None:
            self.signals = frozenset({Signal.TOKENS, Signal.ROUTED})  # type: ignore[misc]
        self._shares_LE = shares_LE.astype(np.float32)
        self._num_tokens = 0

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._num_tokens = len(tokens_T)
        num_layers = self.spec.num_layers if self.ahead is None else self.ahead
        return self._forecast_layers(range(num_layers))

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        assert self.ahead is not None, "called only if `ahead` is set"
        return self._forecast_layers(range(layer + self.ahead, layer + self.ahead + 1))

    def _forecast_layers(self, layers: range) -> list[Forecast]:
        # All tokens share one row: a view, not copies.
        shape = (self._num_tokens, self.spec.num_experts)
        return [
            Forecast(layer, np.broadcast_to(self._shares_LE[layer], shape))
            for layer in layers
            if layer < self.spec.num_layers
        ]

    def files(self) -> dict[str, bytes]:
        return write_tensors({"shares": self._shares_LE})

    def options(self) -> dict[str, Any]:
        return {"ahead": self.ahead}

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        shape = (spec.num_layers, spec.num_experts)
        shares_LE = read_tensors(files, {"shares": shape}, kind=cls.kind)["shares"]
        return cls(spec, shares_LE, **check_options(cls, options))
