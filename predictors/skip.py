"""The skip baseline: a later layer's router, applied to this layer's gate input.

Mixtral-offloading's predictor (ProMoE, section 4.2). It needs no training: the residual stream
changes slowly from layer to layer, so the next router approximates its own choice.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Predictor, Signal
from predictors.errors import PredictorError
from predictors.spec import ModelSpec
from predictors.tensors import read_tensors, write_tensors


class SkipPredictor(Predictor):
    """Forecasts layer l + `horizon` with that layer's router.

    Shape suffixes: L layers, E experts, D hidden size, T tokens.
    """

    kind = "skip"
    signals = frozenset({Signal.GATE_INPUT})
    stateless = True

    def __init__(
        self,
        spec: ModelSpec,
        routers_LED: Floats,
        biases_LE: Floats | None = None,
        *,
        horizon: int = 1,
    ):
        super().__init__(spec)
        assert routers_LED.shape == (spec.num_layers, spec.num_experts, spec.hidden_size)
        if not 1 <= horizon < spec.num_layers:
            raise PredictorError(
                f"skip with horizon {horizon}: the model has {spec.num_layers} layers with experts"
            )
        self.horizon = horizon
        self._routers_LED = routers_LED.astype(np.float32)
        self._biases_LE = None if biases_LE is None else biases_LE.astype(np.float32)

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        target = layer + self.horizon
        if target >= self.spec.num_layers:
            return ()
        logits_TE = hidden_TD @ self._routers_LED[target].T
        if self._biases_LE is not None:
            logits_TE += self._biases_LE[target]
        return [Forecast(target, choice_probabilities(logits_TE, self.spec.top_k))]

    def files(self) -> dict[str, bytes]:
        tensors = {"routers": self._routers_LED}
        if self._biases_LE is not None:
            tensors["biases"] = self._biases_LE
        return write_tensors(tensors)

    def options(self) -> dict[str, Any]:
        return {"horizon": self.horizon}

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        shape = (spec.num_layers, spec.num_experts, spec.hidden_size)
        arrays = read_tensors(files, {"routers": shape}, kind=cls.kind)
        if "biases" in arrays:
            arrays = read_tensors(files, {"routers": shape, "biases": shape[:2]}, kind=cls.kind)
        return cls(spec, arrays["routers"], arrays.get("biases"), horizon=int(options["horizon"]))


def choice_probabilities(logits_TE: Floats, top_k: int) -> Floats:
    """Returns min(top_k x softmax, 1): the probability that each expert is chosen.

    At most `top_k` experts reach 1, so the limit does not change which are the best.
    """
    shifted_TE = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    share_TE = shifted_TE / shifted_TE.sum(axis=1, keepdims=True)
    return np.minimum(top_k * share_TE, 1.0).astype(np.float32)
