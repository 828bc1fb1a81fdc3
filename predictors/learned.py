"""Learned predictors: one small ONNX network per source layer (ProMoE, section 4.3).

Inference only: `train/` exports the graphs; they are loaded here from bytes with checked digests.
"""

from collections.abc import Mapping
from threading import Timer
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
        self._sessions = {layer: open_session(graph) for layer, graph in graphs.items()}
        for layer, session in self._sessions.items():
            check_session_shapes(session, spec, what=f"the {self.kind} network of layer {layer}")

    def listens(self, signal: Signal, layer: int) -> bool:
        return signal in self.signals and layer in self._sessions

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        return self.run_network(layer, hidden_TD)

    def run_network(self, layer: int, hidden_TD: Floats) -> Forecasts:
        """Runs the layer's network, if there is one."""
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


def open_session(graph: bytes) -> "onnxruntime.InferenceSession":
    """Opens a session on one CPU thread: more threads slow a network this small.

    It is opened from bytes, so that the graph cannot refer to any other file, and run once.

    Raises:
        PredictorError: onnxruntime cannot load it, or the run fails, takes longer than
            `TRIAL_SECONDS`, or gives what is not finite.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # An arena would keep the memory of the longest prompt, for each layer's network; a network
    # this small is as fast without one, and without a memory plan for each shape.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except (
        onnxruntime.capi.onnxruntime_pybind11_state.Fail,
        onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
        onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph,
        onnxruntime.capi.onnxruntime_pybind11_state.InvalidProtobuf,
        onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented,
        onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException,
    ) as error:
        raise PredictorError(f"onnxruntime cannot load the network: {error}") from error
    try_session(session)
    return session


TRIAL_SECONDS = 5.0
"""Limit of a network's first run, which takes less than a millisecond."""


def try_session(session: "onnxruntime.InferenceSession") -> None:
    """Runs the network on zeros for one token; PredictorError if that fails."""
    import onnxruntime

    zeros = {}
    for value in session.get_inputs():
        if value.type != "tensor(float)":
            raise PredictorError(f"the network's {value.name} is of {value.type}, not of float32")
        sizes = [size if isinstance(size, int) else 1 for size in value.shape]
        zeros[value.name] = np.zeros(sizes, np.float32)
    options = onnxruntime.RunOptions()
    timer = Timer(TRIAL_SECONDS, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        outputs = session.run(None, zeros, options)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise PredictorError(f"the network cannot be run: {error}") from error
    finally:
        timer.cancel()
    for array in outputs:
        if array.dtype != np.float32:
            raise PredictorError(f"the network gives {array.dtype}; expected float32")
        if not np.isfinite(array).all():
            raise PredictorError("the network gives infinities or NaN for an input of zeros")


def check_session_shapes(
    session: "onnxruntime.InferenceSession", spec: ModelSpec, *, what: str
) -> None:
    """Raises PredictorError unless the network maps the model's hidden size to its experts."""
    inputs = {value.name: value.shape[1:] for value in session.get_inputs()}
    outputs = {value.name: value.shape[1:] for value in session.get_outputs()}
    if inputs != {INPUT: [spec.hidden_size]} or outputs != {OUTPUT: [spec.num_experts]}:
        raise PredictorError(
            f"{what} maps {inputs} to {outputs}; {spec.model_id} needs "
            f"{{'{INPUT}': [{spec.hidden_size}]}} to {{'{OUTPUT}': [{spec.num_experts}]}}: "
            "it was made for another model"
        )
