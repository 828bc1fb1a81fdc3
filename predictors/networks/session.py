"""Computes a network by onnxruntime, where `kernels.c` was not compiled."""

from typing import Any

import numpy as np

from predictors.base import Floats


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
