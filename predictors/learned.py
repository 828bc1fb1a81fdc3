"""Learned predictors at run time: one small ONNX network for each source layer.

Only inference: `train/` makes the graphs, this loads them from bytes that were checked before.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Predictor, Signal
from predictors.errors import PredictorError
from predictors.spec import ModelSpec

if TYPE_CHECKING:
    import onnxruntime

INPUT, OUTPUT = "hidden", "scores"
"""Names in the graph: `hidden [batch, hidden_size]` to `scores [batch, num_experts]`, float32."""


def graph_path(source: int, target: int) -> str:
    """Where the network from one layer to another lies inside a zoo entry."""
    return f"predictors/layer_{source:02d}_to_{target:02d}.onnx"


class LearnedPredictor(Predictor):
    """From a signal of layer l to the experts of layer l + `horizon`, one network each."""

    signals = frozenset({Signal.GATE_INPUT})
    """One: the networks' input."""
    stateless = True
    horizon: ClassVar[int]

    def __init__(self, spec: ModelSpec, graphs: Mapping[int, bytes]):
        """`graphs`: source layer to a whole ONNX file, one for each layer that has a target."""
        super().__init__(spec)
        needed = set(range(spec.num_layers - self.horizon))
        if set(graphs) != needed:
            raise PredictorError(
                f"a {self.kind} predictor of {spec.num_layers} layers has networks for the source "
                f"layers {sorted(needed)}; got {sorted(graphs)}"
            )
        self._graphs = dict(graphs)
        self._sessions = {layer: open_session(graph) for layer, graph in graphs.items()}
        for layer, session in self._sessions.items():
            check_session_shapes(session, spec, what=f"the {self.kind} network of layer {layer}")

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        return self.answer(layer, hidden_TD)

    def answer(self, layer: int, hidden_TD: Floats) -> Forecasts:
        """What the layer's network says, if there is one."""
        session = self._sessions.get(layer)
        if session is None:
            return ()
        (scores_TE,) = session.run([OUTPUT], {INPUT: np.ascontiguousarray(hidden_TD, np.float32)})
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
    """The paper's network, one layer ahead (promoe 4.3)."""

    kind = "mlp"
    horizon = 1


class StridePredictor(LearnedPredictor):
    """The same two layers ahead, so that predicting never eats fetch time (promoe 4.4)."""

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
        return self.answer(layer, hidden_TD)


def open_session(graph: bytes) -> "onnxruntime.InferenceSession":
    """A session on the CPU with one thread: a network this small loses by being divided, and the
    other cores are the model's. From bytes, so that the graph cannot name any other file.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # An arena would keep the most that any prompt needed, for each layer's network; without one
    # and without a plan of memory for each shape a network this small is as quick.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except (
        onnxruntime.capi.onnxruntime_pybind11_state.Fail,
        onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
        onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph,
        onnxruntime.capi.onnxruntime_pybind11_state.InvalidProtobuf,
        onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented,
        onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException,
    ) as error:
        raise PredictorError(f"onnxruntime refuses the network: {error}") from error


def check_session_shapes(
    session: "onnxruntime.InferenceSession", spec: ModelSpec, *, what: str
) -> None:
    """PredictorError unless the network maps this model's hidden size to its experts."""
    inputs = {one.name: one.shape[1:] for one in session.get_inputs()}
    outputs = {one.name: one.shape[1:] for one in session.get_outputs()}
    if inputs != {INPUT: [spec.hidden_size]} or outputs != {OUTPUT: [spec.num_experts]}:
        raise PredictorError(
            f"{what} maps {inputs} to {outputs}; {spec.model_id} needs "
            f"{{'{INPUT}': [{spec.hidden_size}]}} to {{'{OUTPUT}': [{spec.num_experts}]}}: "
            "it was made for another model"
        )
