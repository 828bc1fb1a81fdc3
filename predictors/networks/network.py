"""A predictor's network: an ONNX graph and what computes it.

The graphs that `train.export` writes are computed by `kernels.c`, which is compiled when moecast is
installed; where it is not, and for other graphs, by onnxruntime, whose results are the reference.
Between two layers of a large model, a call of onnxruntime takes two to four times as long as the
same products need, as all that it touches must be fetched from memory again.

Shape suffixes: T rows (tokens).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from threading import Timer
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from predictors.base import Floats
from predictors.errors import PredictorError
from predictors.networks import kernels
from predictors.networks.program import NetworkProgram, UnsupportedGraphError, translate

if TYPE_CHECKING:
    import onnx
    import onnxruntime

log = logging.getLogger(__name__)

Shape = list[Any]
"""Sizes of a declared tensor; a name where any number will do."""

Input = Floats | tuple[Floats, ...]
"""`[T, width]` float32, or several such arrays whose columns follow one another."""


class Network(Protocol):
    """A network that is ready to run."""

    inputs: dict[str, Shape]
    outputs: dict[str, Shape]

    def run(self, wanted: Sequence[str], given: Mapping[str, Input]) -> list[Floats]:
        """Computes the outputs named `wanted`, `[T, ...]` float32 each, from all inputs."""
        ...


class CompiledNetwork:
    """A network that `kernels.c` computes."""

    def __init__(self, model: "onnx.ModelProto", program: NetworkProgram):
        self.inputs = {name: declared_shape(name, model.graph.input) for name in program.inputs}
        self.outputs = {name: declared_shape(name, model.graph.output) for name in program.outputs}
        self._input_names = tuple(program.inputs)
        self._output_shapes = {name: value.shape for name, value in program.outputs.items()}
        self._program = kernels.Program(
            tuple(program.buffers),
            tuple(program.operations),
            tuple(value.number for value in program.inputs.values()),
            tuple(value.number for value in program.outputs.values()),
        )

    def run(self, wanted: Sequence[str], given: Mapping[str, Input]) -> list[Floats]:
        # Without comprehensions, each of which is a call.
        inputs = tuple(map(given.__getitem__, self._input_names))
        first = inputs[0]
        num_rows = len(first[0] if isinstance(first, tuple) else first)
        answers: dict[str, Floats] = {}
        for name in wanted:
            answers[name] = np.empty((num_rows, *self._output_shapes[name]), np.float32)
        self._program.run(num_rows, inputs, tuple(map(answers.get, self._output_shapes)))
        return list(answers.values())


class SessionNetwork:
    """A network that onnxruntime computes, on one thread: more slow a network this small."""

    def __init__(self, graph: bytes):
        """Opens a session from bytes, so that the graph cannot refer to any other file.

        Raises:
            PredictorError: onnxruntime cannot load the graph.
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
            self._session = onnxruntime.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"]
            )
        except (
            onnxruntime.capi.onnxruntime_pybind11_state.Fail,
            onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
            onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph,
            onnxruntime.capi.onnxruntime_pybind11_state.InvalidProtobuf,
            onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented,
            onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException,
        ) as error:
            raise PredictorError(f"onnxruntime cannot load the network: {error}") from error
        for value in self._session.get_inputs():
            if value.type != "tensor(float)":
                raise PredictorError(
                    f"the network's {value.name} is of {value.type}, not of float32"
                )
        self.inputs = {value.name: value.shape for value in self._session.get_inputs()}
        self.outputs = {value.name: value.shape for value in self._session.get_outputs()}
        self._partly = onnxruntime.RunOptions()
        """Skips the nodes that the wanted outputs do not need."""
        self._partly.only_execute_path_to_fetches = True

    def run(self, wanted: Sequence[str], given: Mapping[str, Input]) -> list[Floats]:
        options = self._partly if len(wanted) < len(self.outputs) else None
        return self._run(wanted, given, options)

    def try_run(self, given: Mapping[str, Input]) -> list[Floats]:
        """Computes all outputs; PredictorError if that fails or takes over `TRIAL_SECONDS`."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        timer = Timer(TRIAL_SECONDS, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            return self._run(list(self.outputs), given, options)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise PredictorError(f"the network cannot be run: {error}") from error
        finally:
            timer.cancel()

    def _run(
        self,
        wanted: Sequence[str],
        given: Mapping[str, Input],
        options: "onnxruntime.RunOptions | None",
    ) -> list[Floats]:
        arrays = {
            name: np.concatenate(value, axis=1) if isinstance(value, tuple) else value
            for name, value in given.items()
        }
        return self._session.run(wanted, arrays, options)


TRIAL_SECONDS = 5.0
"""Limit of a network's first run, which takes less than a millisecond."""


def open_network(graph: bytes) -> Network:
    """Opens a network from the bytes of its graph, and runs it once, on zeros for one token.

    Raises:
        PredictorError: The graph cannot be loaded, or the run fails, takes longer than
            `TRIAL_SECONDS`, or gives what is not finite.
    """
    network: CompiledNetwork | SessionNetwork = compile_network(graph) or SessionNetwork(graph)
    zeros = {
        name: np.zeros([size if isinstance(size, int) else 1 for size in shape], np.float32)
        for name, shape in network.inputs.items()
    }
    if isinstance(network, SessionNetwork):
        outputs = network.try_run(zeros)
    else:
        outputs = network.run(list(network.outputs), zeros)
    for array in outputs:
        if array.dtype != np.float32:
            raise PredictorError(f"the network gives {array.dtype}; expected float32")
        if not np.isfinite(array).all():
            raise PredictorError("the network gives infinities or NaN for an input of zeros")
    return network


def compile_network(graph: bytes) -> CompiledNetwork | None:
    """Returns the network for `kernels.c`; None if that is not installed or lacks an operator."""
    if kernels is None:
        return None
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(graph)
        return CompiledNetwork(model, translate(model))
    except DecodeError:
        return None  # onnxruntime says what is wrong with it
    except UnsupportedGraphError as error:
        log.debug("a network is computed by onnxruntime: its graph has %s", error)
        return None


def declared_shape(name: str, values: Iterable["onnx.ValueInfoProto"]) -> Shape:
    """Returns the sizes of a tensor's dimensions, or their names."""
    (value,) = (value for value in values if value.name == name)
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
