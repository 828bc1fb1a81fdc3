"""Learned predictors: one small ONNX network per source layer (ProMoE, section 4.3).

Inference only: `train/` exports the graphs; they are loaded here from bytes with checked digests.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from predictors.base import ConsecutiveForecasts, Floats, Forecasts, Signal
from predictors.errors import PredictorError
from predictors.spec import ModelSpec
from predictors.stored import INPUT, OUTPUT, Paths, StoredPredictor


def graph_path(source: int, target: int) -> str:
    return f"predictors/layer_{source:02d}_to_{target:02d}.onnx"


class LearnedPredictor(StoredPredictor):
    """Forecasts layer l + `horizon` from a signal of layer l, with one network per layer l."""

    signals = frozenset({Signal.GATE_INPUT})
    """The input of the networks."""
    stateless = True
    horizon: ClassVar[int]

    def __init__(self, spec: ModelSpec, graphs: Mapping[int, bytes]):
        """Opens the networks; `graphs` maps every layer that has a target to an ONNX file."""
        super().__init__(spec)
        self._networks = self.open_layer_networks(graphs, {INPUT: spec.hidden_size})

    def listens(self, signal: Signal, layer: int) -> bool:
        return signal in self.signals and layer in self._networks

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        return self.run_network(layer, hidden_TD)

    def run_network(self, layer: int, hidden_TD: Floats) -> Forecasts:
        """Runs the layer's network, if there is one."""
        network = self._networks.get(layer)
        if network is None:
            return ()
        (scores_TE,) = network.run([OUTPUT], {INPUT: np.ascontiguousarray(hidden_TD, np.float32)})
        return ConsecutiveForecasts(layer + self.horizon, scores_TE[:, None])

    @classmethod
    def graph_paths(cls, spec: ModelSpec) -> Paths:
        layers = range(spec.num_layers - cls.horizon)
        return {source: graph_path(source, source + cls.horizon) for source in layers}

    def options(self) -> dict[str, Any]:
        return {"horizon": self.horizon}

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        if options.get("horizon") != cls.horizon:
            raise PredictorError(
                f"a {cls.kind} predictor has horizon {cls.horizon}; this one was made with "
                f"{options.get('horizon')}"
            )
        return super().from_files(spec, files, {})


class MlpPredictor(LearnedPredictor):
    """The network of ProMoE, section 4.3, one layer ahead."""

    kind = "mlp"
    horizon = 1


class StridePredictor(LearnedPredictor):
    """The same network two layers ahead, so that prediction overlaps with the previous layer.

    ProMoE, section 4.4.
    """

    kind = "stride"
    horizon = 2


class PreAttentionPredictor(LearnedPredictor):
    """The network of `mlp`, from the input of a layer to that layer's own experts.

    It covers the first layer too, which no earlier layer can forecast; only the layer's attention
    is left as time to fetch.
    """

    kind = "pre-attention"
    signals = frozenset({Signal.LAYER_INPUT})
    horizon = 0

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        return self.run_network(layer, hidden_TD)
