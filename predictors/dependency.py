"""The dependency baseline: every expert of the next layer, by id.

DeepSpeed-Inference prefetches so (MoE-Infinity (request level), section 5.1, figure 6a), as does
ZeRO-Infinity with the first ids only (MoE-Infinity (sequence level), section 8.3, "TopK"): any
expert may follow any expert of the layer before, so all are fetched in the order of their ids.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.errors import PredictorError
from predictors.spec import ModelSpec


class DependencyPredictor(Predictor):
    """Layer 0 is forecast when the step begins, layer l+1 when layer l is routed. T tokens."""

    kind = "dependency"
    signals = frozenset({Signal.TOKENS, Signal.ROUTED})
    stateless = True

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self._num_tokens = 0
        self._wanted = list(range(spec.num_experts))

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._num_tokens = len(tokens_T)
        return [self._forecast_all(0)]

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        return [self._forecast_all(layer + 1)] if layer + 1 < self.spec.num_layers else ()

    def _forecast_all(self, layer: int) -> Forecast:
        spec = self.spec
        even = np.float32(spec.top_k / spec.num_experts)
        scores_TE = np.broadcast_to(even, (self._num_tokens, spec.num_experts))
        return Forecast(layer, scores_TE, wanted=self._wanted)

    def files(self) -> dict[str, bytes]:
        return {}

    @classmethod
    def from_files(
        cls,
        spec: ModelSpec,
        files: Mapping[str, bytes],
        options: Mapping[str, Any],  # noqa: ARG003
    ) -> Self:
        if files:
            raise PredictorError(f"a {cls.kind} predictor has no files; got {sorted(files)}")
        return cls(spec)
