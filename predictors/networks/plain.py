"""Computes a network's program in NumPy, where `kernels.c` was not compiled."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats
from predictors.networks.program import Code


class PlainProgram:
    """A `kernels.Program`, with the same arguments and results up to the order of additions."""

    def __init__(
        self,
        buffers: tuple[tuple[int, int, int], ...],
        operations: tuple[tuple[Any, ...], ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
    ):
        self._buffers = buffers
        self._operations = operations
        self._inputs = inputs
        self._outputs = outputs

    def run(
        self,
        rows: int,
        inputs: tuple[Floats | tuple[Floats, ...], ...],
        outputs: tuple[Floats | None, ...],
    ) -> None:
        """Fills the outputs; None: one that is not needed."""
        values: list[Floats] = []
        for parent, first, width in self._buffers:
            if parent < 0:
                values.append(np.empty((rows, width), np.float32))
            else:
                values.append(values[parent][:, first : first + width])
        for number, given in zip(self._inputs, inputs, strict=True):
            parts = given if isinstance(given, tuple) else (given,)
            np.concatenate([part.reshape(rows, -1) for part in parts], 1, out=values[number])
        with np.errstate(all="ignore"):
            for code, target, source, added, group, *arrays in self._operations:
                result = compute(code, values[source], group, *arrays)
                if added >= 0:
                    result = result + values[added]
                values[target][:] = result.reshape(rows, -1)
        for number, array in zip(self._outputs, outputs, strict=True):
            if array is not None:
                array[:] = values[number].reshape(array.shape)


def compute(
    code: int, x_TK: NDArray, group: int, vector: Any, weight_NK: Any, scale_N: Any
) -> NDArray:
    """Returns the result of an operation, to which another value may be added."""
    if code == Code.RELU:
        return np.maximum(x_TK, 0)
    if code == Code.SIGMOID:
        return (1 + np.tanh(x_TK / 2)) / 2
    if code == Code.LOG_SOFTMAX:
        groups = x_TK.reshape(len(x_TK), -1, group)
        groups = groups - groups.max(-1, keepdims=True)
        return groups - np.log(np.exp(groups).sum(-1, keepdims=True))
    if code == Code.MULTIPLY_VECTOR:
        return x_TK * vector
    if code == Code.PRODUCT:
        x_TK = x_TK @ weight_NK.T if scale_N is None else multiply(x_TK, weight_NK, scale_N)
    return x_TK if vector is None else x_TK + vector


def multiply(x_TK: Floats, weight_NK: NDArray, scale_N: Floats) -> Floats:
    """Returns a product in eight bits, whose inputs are rounded as DynamicQuantizeLinear does."""
    least, most = min(x_TK.min(), np.float32(0)), max(x_TK.max(), np.float32(0))
    scale = (most - least) / np.float32(255) if most > least else np.float32(1)
    zero = np.clip(np.rint(-least / scale), 0, 255)
    integers_TK = np.clip(np.rint(x_TK / scale) + zero, 0, 255) - zero
    return (integers_TK @ weight_NK.T.astype(np.float32)) * (scale * scale_N)
