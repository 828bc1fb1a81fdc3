"""Translates an ONNX graph into a program for `kernels.c`, if it can compute all of it.

A value of the graph is a buffer of `[T, width]` float32 numbers, some columns of one, or nothing
yet: the five operators of a quantised product (DynamicQuantizeLinear, MatMulInteger, Cast, Mul,
Mul) and what is added to it become one operation.

Shape suffixes: T rows (tokens), K inputs of a product, N outputs of a product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats

if TYPE_CHECKING:
    import onnx

MAX_COLUMNS = 1 << 20
"""Numbers of a row in all buffers; no predictor's network is near it."""
MAX_INPUTS = 1 << 16
"""Inputs of a product in integers, whose sums have 32 bits."""


INTEGERS, SCALE, ZERO = ROLES = ("integers", "scale", "zero point")
"""Outputs of DynamicQuantizeLinear."""


class UnsupportedGraphError(Exception):
    """The graph has something that programs do not compute."""


class Code(IntEnum):
    """An operation, numbered as in `kernels.c`."""

    ADD_VECTOR = 0
    MULTIPLY_VECTOR = 1
    ADD = 2
    RELU = 3
    LOG_SOFTMAX = 4
    SIGMOID = 5
    PRODUCT = 6


@dataclass(frozen=True)
class BufferValue:
    """Numbers that an operation computes, or some columns of them."""

    number: int
    shape: tuple[int, ...]
    """Shape of a row."""

    @property
    def width(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True, eq=False)
class ProductValue:
    """A product to compute once its scale and what is added to it are known."""

    source: BufferValue
    weight_KN: NDArray
    scale_N: Floats | None = None
    """Scales of weights in eight bits; None: float32 weights, or not known yet."""
    bias_N: Floats | None = None
    added: BufferValue | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.weight_KN.shape[1],)


@dataclass(frozen=True, eq=False)
class QuantisedValue:
    """An output of DynamicQuantizeLinear, or its scale times those of weights."""

    source: BufferValue
    role: str
    """One of `ROLES`."""
    scale_N: Floats | None = None


Value = BufferValue | ProductValue | QuantisedValue


@dataclass
class NetworkProgram:
    """Arguments of `kernels.Program`, and the names of what goes in and comes out."""

    buffers: list[tuple[int, int, int]] = field(default_factory=list)
    """The buffer that it is a part of or -1, the first column in it, columns."""
    operations: list[tuple[Any, ...]] = field(default_factory=list)
    inputs: dict[str, BufferValue] = field(default_factory=dict)
    outputs: dict[str, BufferValue] = field(default_factory=dict)


def translate(model: "onnx.ModelProto") -> NetworkProgram:
    """Returns the program of a graph.

    Raises:
        UnsupportedGraphError: The graph has an operator, a shape or a form that programs lack.
    """
    return _Translator(model.graph).translate()


class _Translator:
    def __init__(self, graph: "onnx.GraphProto"):
        from onnx import numpy_helper

        self._graph = graph
        self._constants: dict[str, NDArray] = {
            tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer
        }
        self._values: dict[str, Value] = {}
        self._program = NetworkProgram()

    def translate(self) -> NetworkProgram:
        program = self._program
        for item in self._graph.input:
            if item.name in self._constants:
                continue
            value = self._make_buffer(read_row_shape(item))
            self._values[item.name] = program.inputs[item.name] = value
        for node in self._graph.node:
            self._translate_node(node)
        for item in self._graph.output:
            value = self._compute(self._find(item.name))
            if read_row_shape(item) != value.shape:
                raise UnsupportedGraphError(f"{item.name} has the shape {value.shape}")
            program.outputs[item.name] = value
        if not program.inputs or not program.outputs:
            raise UnsupportedGraphError("a graph without inputs or outputs")
        return program

    # ---- values

    def _make_buffer(
        self, shape: tuple[int, ...], *, parent: int = -1, first: int = 0
    ) -> BufferValue:
        value = BufferValue(len(self._program.buffers), shape)
        self._program.buffers.append((parent, first, value.width))
        own = sum(width for parent, _, width in self._program.buffers if parent < 0)
        if own > MAX_COLUMNS:
            raise UnsupportedGraphError(f"rows of {own} numbers")
        return value

    def _find(self, name: str) -> Value:
        if name not in self._values:
            raise UnsupportedGraphError(f"the value {name!r}")
        return self._values[name]

    def _constant(self, name: str, dtype: type = np.float32) -> NDArray:
        array = self._constants.get(name)
        if array is None or array.dtype != dtype:
            raise UnsupportedGraphError(f"{name!r} is not a constant of {np.dtype(dtype)}")
        return array

    def _compute(self, value: Value) -> BufferValue:
        """Returns the value in a buffer."""
        if isinstance(value, BufferValue):
            return value
        if isinstance(value, QuantisedValue) or (
            value.scale_N is None and value.weight_KN.dtype != np.float32
        ):
            raise UnsupportedGraphError("integers that are no whole quantised product")
        target = self._make_buffer(value.shape)
        self._emit(
            Code.PRODUCT,
            target,
            value.source,
            added=value.added,
            vector=value.bias_N,
            weight_NK=np.ascontiguousarray(value.weight_KN.T),
            scale_N=value.scale_N,
        )
        return target

    def _emit(
        self,
        code: Code,
        target: BufferValue,
        source: BufferValue,
        *,
        added: BufferValue | None = None,
        group: int = 0,
        vector: Floats | None = None,
        weight_NK: NDArray | None = None,
        scale_N: Floats | None = None,
    ) -> None:
        added_number = -1 if added is None else added.number
        numbers = int(code), target.number, source.number, added_number, group
        self._program.operations.append((*numbers, vector, weight_NK, scale_N))

    # ---- operators

    def _translate_node(self, node: "onnx.NodeProto") -> None:
        translate_node = getattr(self, f"_translate_{node.op_type.lower()}", None)
        if translate_node is None or node.domain:
            raise UnsupportedGraphError(f"the operator {node.op_type}")
        given = [name for name in node.input if name]
        answer = translate_node(given, read_attributes(node))
        values = answer if isinstance(answer, tuple) else (answer,)
        self._values.update(zip(node.output, values, strict=True))

    def _translate_gemm(self, given: Sequence[str], attributes: Mapping[str, Any]) -> Value:
        if any(attributes.get(name, default) != default for name, default in GEMM_DEFAULTS.items()):
            raise UnsupportedGraphError(f"Gemm with {dict(attributes)}")
        value = self._translate_matmul(given[:2], {})
        return value if len(given) == 2 else self._add(value, given[2])

    def _translate_matmul(self, given: Sequence[str], _: Mapping[str, Any]) -> Value:
        source = self._compute(self._find(given[0]))
        weight_KN = self._constant(given[1])
        return ProductValue(source, check_weights(weight_KN, source))

    def _translate_dynamicquantizelinear(
        self, given: Sequence[str], _: Mapping[str, Any]
    ) -> tuple[Value, ...]:
        source = self._compute(self._find(given[0]))
        return tuple(QuantisedValue(source, role) for role in ROLES)

    def _translate_matmulinteger(self, given: Sequence[str], _: Mapping[str, Any]) -> Value:
        if len(given) != 4:
            raise UnsupportedGraphError("MatMulInteger without zero points")
        value, zero = self._find(given[0]), self._find(given[2])
        if not has_role(value, INTEGERS) or not has_role(zero, ZERO, value.source):
            raise UnsupportedGraphError("MatMulInteger of other integers")
        weight_KN = check_weights(self._constant(given[1], np.int8), value.source)
        if self._constant(given[3], np.int8).any() or len(weight_KN) > MAX_INPUTS:
            raise UnsupportedGraphError("MatMulInteger with zero points, or too many inputs")
        return ProductValue(value.source, weight_KN)

    def _translate_cast(self, given: Sequence[str], attributes: Mapping[str, Any]) -> Value:
        value = self._find(given[0])
        if attributes.get("to") != FLOAT or not isinstance(value, ProductValue):
            raise UnsupportedGraphError("Cast of other values")
        return value

    def _translate_mul(self, given: Sequence[str], _: Mapping[str, Any]) -> Value:
        value, other = self._split_operands(given)
        if isinstance(value, ProductValue) and isinstance(other, QuantisedValue):
            return self._scale(value, other)
        if isinstance(value, QuantisedValue) and isinstance(other, ProductValue):
            return self._scale(other, value)
        if isinstance(other, BufferValue | ProductValue | QuantisedValue):
            raise UnsupportedGraphError("Mul of two values")
        if has_role(value, SCALE) and value.scale_N is None:
            return replace(value, scale_N=self._constant(other).reshape(-1))
        return self._apply_vector(Code.MULTIPLY_VECTOR, value, self._constant(other))

    def _scale(self, product: ProductValue, scale: QuantisedValue) -> ProductValue:
        num_outputs = product.weight_KN.shape[1]
        if not has_role(scale, SCALE, product.source) or scale.scale_N is None:
            raise UnsupportedGraphError("a scale of another product")
        if len(scale.scale_N) not in (1, num_outputs):
            raise UnsupportedGraphError("scales of other outputs")
        scale_N = np.ascontiguousarray(np.broadcast_to(scale.scale_N, num_outputs))
        return replace(product, scale_N=scale_N)

    def _translate_add(self, given: Sequence[str], _: Mapping[str, Any]) -> Value:
        value, other = self._split_operands(given)
        if isinstance(other, str):
            return self._add(value, other)
        if isinstance(other, ProductValue):
            value, other = other, value
        return self._add_buffer(value, self._compute(other))

    def _translate_sub(self, given: Sequence[str], _: Mapping[str, Any]) -> Value:
        value = self._find(given[0])
        return self._apply_vector(Code.ADD_VECTOR, value, -self._constant(given[1]))

    def _split_operands(self, given: Sequence[str]) -> tuple[Value, Value | str]:
        """Returns a value, and the other one or the name of a constant."""
        first, second = given
        if first in self._constants:
            first, second = second, first
        return self._find(first), second if second in self._constants else self._find(second)

    def _add(self, value: Value, name: str) -> Value:
        if name not in self._constants:
            return self._add_buffer(value, self._compute(self._find(name)))
        constant = self._constant(name)
        if is_open_product(value) and value.bias_N is None:
            return replace(value, bias_N=expand(constant, value.shape))
        return self._apply_vector(Code.ADD_VECTOR, value, constant)

    def _add_buffer(self, value: Value, other: BufferValue) -> Value:
        if value == other or isinstance(value, QuantisedValue):
            raise UnsupportedGraphError("Add of one value to itself, or to integers")
        if value.shape != other.shape:
            raise UnsupportedGraphError(f"Add of shapes {value.shape} and {other.shape}")
        if is_open_product(value) and value.added is None:
            return replace(value, added=other)
        source = self._compute(value)
        target = self._make_buffer(source.shape)
        self._emit(Code.ADD, target, source, added=other)
        return target

    def _apply_vector(self, code: Code, value: Value, constant: NDArray) -> BufferValue:
        source = self._compute(value)
        target = self._make_buffer(source.shape)
        self._emit(code, target, source, vector=expand(constant, source.shape))
        return target

    def _apply(self, code: Code, name: str, *, group: int = 0) -> BufferValue:
        source = self._compute(self._find(name))
        target = self._make_buffer(source.shape)
        self._emit(code, target, source, group=group)
        return target

    def _translate_relu(self, given: Sequence[str], _: Mapping[str, Any]) -> Value:
        return self._apply(Code.RELU, given[0])

    def _translate_sigmoid(self, given: Sequence[str], _: Mapping[str, Any]) -> Value:
        return self._apply(Code.SIGMOID, given[0])

    def _translate_logsoftmax(self, given: Sequence[str], attributes: Mapping[str, Any]) -> Value:
        shape = self._compute(self._find(given[0])).shape
        if attributes.get("axis", -1) not in (-1, len(shape)):
            raise UnsupportedGraphError("LogSoftmax along another axis than the last")
        return self._apply(Code.LOG_SOFTMAX, given[0], group=shape[-1])

    def _translate_reshape(self, given: Sequence[str], attributes: Mapping[str, Any]) -> Value:
        source = self._compute(self._find(given[0]))
        rows, *shape = self._constant(given[1], np.int64).tolist()
        if attributes or rows != -1 or min(shape, default=0) < 1:
            raise UnsupportedGraphError("Reshape across rows")
        if int(np.prod(shape)) != source.width:
            raise UnsupportedGraphError(f"Reshape of {source.shape} to {shape}")
        return BufferValue(source.number, tuple(shape))

    def _translate_split(
        self, given: Sequence[str], attributes: Mapping[str, Any]
    ) -> tuple[Value, ...]:
        source = self._compute(self._find(given[0]))
        sizes = self._constant(given[1], np.int64).tolist()
        if attributes.get("axis") != 1 or len(source.shape) != 1 or sum(sizes) != source.width:
            raise UnsupportedGraphError("Split along another axis than the columns")
        if min(sizes) < 1:
            raise UnsupportedGraphError("Split into empty parts")
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        return tuple(
            self._make_buffer((size,), parent=source.number, first=start)
            for start, size in zip(starts, sizes, strict=True)
        )


GEMM_DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}

FLOAT = 1
"""`onnx.TensorProto.FLOAT`."""


def has_role(
    value: Value, role: str, source: BufferValue | None = None
) -> TypeGuard[QuantisedValue]:
    """Returns whether the value is this output of DynamicQuantizeLinear, of `source` if given."""
    if not isinstance(value, QuantisedValue) or value.role != role:
        return False
    return source is None or value.source == source


def is_open_product(value: Value) -> TypeGuard[ProductValue]:
    """Returns whether something may still be added to the product within its operation."""
    if not isinstance(value, ProductValue):
        return False
    return value.scale_N is not None or value.weight_KN.dtype == np.float32


def check_weights(weight_KN: NDArray, source: BufferValue) -> NDArray:
    if weight_KN.ndim != 2 or source.shape != (len(weight_KN),) or not weight_KN.size:
        raise UnsupportedGraphError(f"a product of {source.shape} and {weight_KN.shape}")
    return weight_KN


def expand(constant: NDArray, shape: tuple[int, ...]) -> Floats:
    """Returns the constant for every number of a row; one that depends on the row has no such."""
    try:
        whole = np.broadcast_to(constant, (1, *shape))
    except ValueError as error:
        raise UnsupportedGraphError(f"{constant.shape} next to rows of {shape}") from error
    return np.ascontiguousarray(whole.reshape(-1), np.float32)


def read_row_shape(value: "onnx.ValueInfoProto") -> tuple[int, ...]:
    """Returns the sizes of a value without the first one, which is the number of rows."""
    rows, *sizes = value.type.tensor_type.shape.dim
    if rows.HasField("dim_value") or not sizes or not all(dim.dim_value > 0 for dim in sizes):
        raise UnsupportedGraphError(f"{value.name!r} does not have rows of a fixed size")
    return tuple(dim.dim_value for dim in sizes)


def read_attributes(node: "onnx.NodeProto") -> dict[str, Any]:
    from onnx import helper

    return {item.name: helper.get_attribute_value(item) for item in node.attribute}
