"""A predictor's network: an ONNX graph as a program, and what computes it.

Programs are computed by `kernels.c`, which is compiled when moecast is installed, or else by
onnxruntime. Both get exactly the graphs that `program` reads, so that an entry is taken on every
machine or on none.
Between two layers of a large model, a call of onnxruntime takes two to four times as long as the
same products need, as all that it touches must be fetched from memory again.

Shape suffixes: T rows (tokens).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictors.base import Floats
from predictors.networks import kernels
from predictors.networks.program import NetworkProgram, translate

Input = Floats | tuple[Floats, ...]
"""`[T, width]` float32, or several such arrays whose columns follow one another."""


class Network:
    """A network that is ready to run."""

    def __init__(self, graph: bytes):
        """Opens a network from the bytes of its graph.

        Raises:
            PredictorError: `train.export` writes no such graph.
        """
        program = translate(graph)
        self.inputs = program.input_shapes
        self.outputs = program.output_shapes
        self._output_shapes = {name: tuple(shape[1:]) for name, shape in self.outputs.items()}
        self._program = SessionProgram(graph) if kernels is None else compile_program(program)

    def run(self, wanted: Sequence[str], given: Mapping[str, Input]) -> list[Floats]:
        """Computes the outputs named `wanted`, `[T, ...]` float32 each, from all inputs."""
        # Without comprehensions, each of which is a call.
        inputs = tuple(map(given.__getitem__, self.inputs))
        first = inputs[0]
        num_rows = len(first[0] if isinstance(first, tuple) else first)
        answers: dict[str, Floats] = {}
        for name in wanted:
            answers[name] = np.empty((num_rows, *self._output_shapes[name]), np.float32)
        self._program.run(num_rows, inputs, tuple(map(answers.get, self._output_shapes)))
        return list(answers.values())


def compile_program(program: NetworkProgram) -> "kernels.Program":
    operations = tuple(
        (*before, None if weight_NK is None else np.ascontiguousarray(weight_NK), scale_N)
        for *before, weight_NK, scale_N in program.operations
    )
    return kernels.Program(
        tuple(program.buffers), operations, tuple(program.inputs), tuple(program.outputs)
    )


class SessionProgram:
    """Has the `run` of a `kernels.Program`, on one thread: more slow a network this small.

    Args:
        graph: A graph that `program.translate` takes: it is bounded, and there is nothing in it
            that could be computed while it is opened.
    """

    def __init__(self, graph: bytes):
        # Where networks are compiled, nobody waits for this import.
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # An arena would keep the memory of the longest prompt, for each layer's network; a network
        # this small is as fast without one, and without a memory plan for each shape.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        self._session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [value.name for value in self._session.get_inputs()]
        self._outputs = [value.name for value in self._session.get_outputs()]
        self._partly = onnxruntime.RunOptions()
        """Skips the nodes that the wanted outputs do not need."""
        self._partly.only_execute_path_to_fetches = True

    def run(
        self,
        rows: int,  # noqa: ARG002
        inputs: tuple[Floats | tuple[Floats, ...], ...],
        outputs: tuple[Floats | None, ...],
    ) -> None:
        """Fills the outputs; None: one that is not needed."""
        given: dict[str, Any] = {
            name: np.concatenate(value, axis=1) if isinstance(value, tuple) else value
            for name, value in zip(self._inputs, inputs, strict=True)
        }
        wanted = [
            name for name, array in zip(self._outputs, outputs, strict=True) if array is not None
        ]
        computed = iter(self._session.run(wanted, given, self._partly))
        for array in outputs:
            if array is not None:
                array[:] = next(computed)
