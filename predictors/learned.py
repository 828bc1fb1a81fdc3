"""Learned predictors: one small ONNX network per source layer (ProMoE, section 4.3).

Inference only: `train/` exports the graphs; they are loaded here from bytes with checked digests.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Predictor, Signal
from predictors.errors import PredictorError
from predictors.networks.network import Network, open_network
from predictors.spec import ModelSpec

INPUT, OUTPUT = "hidden", "scores"
"""Names in the graph: `hidden [batch, hidden_size]` to `scores [batch, num_experts]`, float32."""


def graph_path(source: int, target: int) -> str:
    return f"predictors/layer_{source:02d}_to_{target:02d}.onnx"


class LearnedPredictor(Predictor):
    """Forecasts layer l + `horizon` from a signal of layer l, with one network per layer l."""

    signals = frozenset({Signal.GATE_INPUT})
    """The input of the networks."""
    stateless = True
    horizon: ClassVar[int]

    def __init__(self, spec: ModelSpec, graphs: Mapping[int, bytes]):
        """Opens the networks; `graphs` maps every layer that has a target to an ONNX file."""
        super().__init__(spec)
        needed = set(range(spec.num_layers - self.horizon))
        if set(graphs) != needed:
            raise PredictorError(
                f"a {self.kind} predictor of {spec.num_layers} layers has networks for the source "
                f"layers {sorted(needed)}; got {sorted(graphs)}"
            )
        self._graphs = dict(graphs)
        self._networks = {layer: open_network(graph) for layer, graph in graphs.items()}
        for layer, network in self._networks.items():
            check_network_shapes(network, spec, what=f"the {self.kind} network of layer {layer}")

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
        return [Forecast(layer + self.horizon, scores_TE)]

    def files(self) -> dict[str, bytes]:
        return {graph_path(s, s + self.horizon): graph for s, graph in self._graphs.items()}

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
        paths = {s: graph_path(s, s + cls.horizon) for s in range(spec.num_layers - cls.horizon)}
        missing = sorted(set(paths.values()) - set(files))
        if missing:
            raise PredictorError(
                f"a {cls.kind} predictor of {spec.num_layers} layers has {len(paths)} networks; "
                f"missing: {', '.join(missing[:3])}"
            )
        return cls(spec, {source: files[path] for source, path in paths.items()})


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


def check_network_shapes(network: Network, spec: ModelSpec, *, what: str) -> None:
    """Raises PredictorError unless the network maps the model's hidden size to its experts."""
    inputs = {name: shape[1:] for name, shape in network.inputs.items()}
    outputs = {name: shape[1:] for name, shape in network.outputs.items()}
    if inputs != {INPUT: [spec.hidden_size]} or outputs != {OUTPUT: [spec.num_experts]}:
        raise PredictorError(
            f"{what} maps {inputs} to {outputs}; {spec.model_id} needs "
            f"{{'{INPUT}': [{spec.hidden_size}]}} to {{'{OUTPUT}': [{spec.num_experts}]}}: "
            "it was made for another model"
        )
