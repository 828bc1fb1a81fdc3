"""Reads the ONNX graphs that `train.export` writes as programs of a few operations.

What is none of them is refused, whatever would compute it: a program's buffers, weights and
operations are bounded, and each operation takes rows that a predictor is given, so that nothing is
computed while a graph is read. Bytes are measured before anything is parsed.

A value of the graph is a buffer of `[T, width]` float32 numbers, some columns of one, or nothing
yet: the five operators of a quantised product (DynamicQuantizeLinear, MatMulInteger, Cast, Mul,
Mul) and what is added to it become one operation. So does an Einsum over experts, of which only the
chosen ones' matrices are read.

Shape suffixes: T rows (tokens), K inputs of a product, N outputs of a product.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats
from predictors.errors import PredictorError
from predictors.networks.structure import measure_structure

if TYPE_CHECKING:
    import onnx

MAX_NODES = 1000
"""An exported graph has some twenty."""
MAX_COLUMNS = 1 << 20
"""Numbers of a row in all values; no predictor's network is near it."""
MAX_WEIGHT_BYTES = 64 << 20
"""Those of all products; as much as an entry's graph may have."""
MAX_INPUTS = 1 << 16
"""Inputs of a product in integers, whose sums have 32 bits."""
DOMAINS = ("", "ai.onnx")
"""Names of the standard operators; any other domain may need a library."""
OPSETS = range(13, 22)
"""Versions of the standard operators in which those of a program compute the same."""
FLOAT, INT8, INT64 = 1, 3, 7
"""As in `onnx.TensorProto`."""

INTEGERS, SCALE, ZERO = ROLES = ("integers", "scale", "zero point")
"""Outputs of DynamicQuantizeLinear."""

Shape = list[Any]
"""Sizes of a declared tensor; of the first dimension, the number of rows, its name."""


class GraphError(PredictorError):
    """The graph is none that `moecast train` writes."""

    def __init__(self, found: str):
        super().__init__(f"the graph is none that `moecast train` writes: it has {found}")


class Code(IntEnum):
    """An operation, numbered as in `kernels.c`."""

    ADD_VECTOR = 0
    MULTIPLY_VECTOR = 1
    ADD = 2
    RELU = 3
    LOG_SOFTMAX = 4
    SIGMOID = 5
    PRODUCT = 6
    CHOSEN = 7


@dataclass(frozen=True)
class BufferValue:
    """Numbers that an operation computes, or some columns of them."""

    number: int
    shape: tuple[int, ...]
    """Shape of a row."""


@dataclass(frozen=True, eq=False)
class ProductValue:
    """A product to compute once its scale and what is added to it are known."""

    source: BufferValue
    weight_KN: NDArray
    is_integer: bool = False
    """The product of integers as MatMulInteger gives it, before Cast."""
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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape


@dataclass(frozen=True, eq=False)
class ConvertedValue:
    """A constant of int8 numbers, converted to float32 ones."""

    array: NDArray
    shape: tuple[int, ...] = ()


Value = BufferValue | ProductValue | QuantisedValue | ConvertedValue


@dataclass
class NetworkProgram:
    """Arguments of a `Program`, and the shapes of what goes in and comes out."""

    buffers: list[tuple[int, int, int]] = field(default_factory=list)
    """The buffer that it is a part of or -1, the first column in it, columns."""
    operations: list[tuple[Any, ...]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    """Their buffers, in the order of `input_shapes`."""
    outputs: list[int] = field(default_factory=list)
    input_shapes: dict[str, Shape] = field(default_factory=dict)
    output_shapes: dict[str, Shape] = field(default_factory=dict)


def translate(graph: bytes) -> NetworkProgram:
    """Returns the program of an ONNX file.

    Raises:
        GraphError: It has an operator, a shape or a form that `train.export` does not write.
    """
    import onnx
    from google.protobuf.message import DecodeError

    measure_structure(graph)
    try:
        model = onnx.load_model_from_string(graph)
    except DecodeError as error:
        raise GraphError(f"bytes that are not an ONNX model ({error})") from error
    versions = {item.version for item in model.opset_import if item.domain in DOMAINS}
    if len(versions) != 1 or not versions <= set(OPSETS):
        raise GraphError(f"operators of the versions {sorted(versions)[:8]}")
    if model.functions or model.graph.sparse_initializer:
        raise GraphError("functions or sparse tensors")
    if len(model.graph.node) > MAX_NODES:
        raise GraphError(f"{len(model.graph.node):,} operators, over {MAX_NODES:,}")
    return _Translator().translate(model.graph)


class _Translator:
    def __init__(self) -> None:
        self._constants: dict[str, NDArray] = {}
        self._values: dict[str, Value] = {}
        self._columns = 0
        self._weight_bytes = 0
        self._program = NetworkProgram()

    def translate(self, graph: "onnx.GraphProto") -> NetworkProgram:
        program = self._program
        for tensor in graph.initializer:
            self._check_name(tensor.name)
            self._constants[tensor.name] = read_tensor(tensor)
        for item in graph.input:
            shape = read_shape(item)
            value = self._make_buffer(tuple(shape[1:]))
            self._define(item.name, value)
            program.input_shapes[item.name] = shape
            program.inputs.append(value.number)
        for node in graph.node:
            self._translate_node(node)
        for item in graph.output:
            shape, value = read_shape(item), self._buffer(item.name)
            if tuple(shape[1:]) != value.shape or item.name in program.output_shapes:
                raise GraphError(f"{item.name!r} declared as {shape}, which is {value.shape}")
            program.output_shapes[item.name] = shape
            program.outputs.append(value.number)
        if not program.inputs or not program.outputs:
            raise GraphError("no inputs or no outputs")
        return program

    # ---- values

    def _check_name(self, name: str) -> None:
        if not is_name(name) or name in self._values or name in self._constants:
            raise GraphError(f"two values, or one without a name, as {name!r:.80}")

    def _define(self, name: str, value: Value) -> None:
        self._check_name(name)
        self._values[name] = value
        self._columns += math.prod(value.shape)
        if self._columns > MAX_COLUMNS:
            raise GraphError(f"rows of {self._columns:,} numbers, over {MAX_COLUMNS:,}")

    def _make_buffer(
        self, shape: tuple[int, ...], *, parent: int = -1, first: int = 0
    ) -> BufferValue:
        value = BufferValue(len(self._program.buffers), shape)
        self._program.buffers.append((parent, first, math.prod(shape)))
        return value

    def _find(self, name: str) -> Value:
        if name not in self._values:
            raise GraphError(f"an operator or output of {name!r:.80}, which nothing computes")
        return self._values[name]

    def _constant(self, name: str, dtype: type = np.float32) -> NDArray:
        array = self._constants.get(name)
        if array is None or array.dtype != dtype:
            raise GraphError(f"{name!r:.80} where a constant of {np.dtype(dtype)} belongs")
        return array

    def _integers(self, name: str) -> list[int]:
        array = self._constant(name, np.int64)
        if array.ndim != 1:
            raise GraphError(f"{name!r:.80} where a list of sizes belongs")
        return array.tolist()

    def _buffer(self, name: str) -> BufferValue:
        """Returns the value in a buffer, which is computed once."""
        value = self._values[name] = self._compute(self._find(name))
        return value

    def _compute(self, value: Value) -> BufferValue:
        if isinstance(value, BufferValue):
            return value
        if not is_whole(value):
            raise GraphError("integers that are no whole quantised product")
        self._count_weights(value.weight_KN)
        return self._apply(
            Code.PRODUCT,
            value.source,
            shape=value.shape,
            added=value.added,
            vector=value.bias_N,
            weight_NK=value.weight_KN.T,
            scale_N=value.scale_N,
        )

    def _count_weights(self, weights: NDArray) -> None:
        self._weight_bytes += weights.nbytes
        if self._weight_bytes > MAX_WEIGHT_BYTES:
            raise GraphError(f"products of {self._weight_bytes:,} bytes, over {MAX_WEIGHT_BYTES:,}")

    def _apply(
        self,
        code: Code,
        source: BufferValue,
        *,
        shape: tuple[int, ...] | None = None,
        added: BufferValue | None = None,
        group: int = 0,
        vector: Floats | None = None,
        weight_NK: NDArray | None = None,
        scale_N: Floats | None = None,
    ) -> BufferValue:
        """Returns what an operation gives, which is of the source's shape by default."""
        target = self._make_buffer(source.shape if shape is None else shape)
        added_number = -1 if added is None else added.number
        numbers = int(code), target.number, source.number, added_number, group
        self._program.operations.append((*numbers, vector, weight_NK, scale_N))
        return target

    # ---- operators: names of inputs, attributes by keyword

    def _translate_node(self, node: "onnx.NodeProto") -> None:
        operator = self.OPERATORS.get(node.op_type) if node.domain in DOMAINS else None
        if operator is None:
            raise GraphError(
                f"the operator {node.op_type!r:.80} of {node.domain or 'ONNX'!r:.80}; allowed are "
                f"{', '.join(sorted(self.OPERATORS))}"
            )
        try:
            bound = inspect.signature(operator).bind(self, *node.input, **read_attributes(node))
        except (TypeError, ValueError) as error:
            raise GraphError(
                f"{node.op_type} of other inputs or attributes ({error!s:.80})"
            ) from error
        answer = operator(*bound.args, **bound.kwargs)
        values = answer if isinstance(answer, tuple) else (answer,)
        if len(values) != len(node.output):
            raise GraphError(f"{node.op_type} with {len(node.output)} outputs")
        for name, value in zip(node.output, values, strict=True):
            self._define(name, value)

    def _gemm(
        self, source: str, weight: str, bias: str | None = None, **attributes: float
    ) -> Value:
        if not attributes.items() <= GEMM_DEFAULTS.items():
            raise GraphError("Gemm with factors, or of transposed values")
        value = self._buffer(source)
        product = ProductValue(value, check_weights(self._constant(weight), value))
        return product if bias is None else self._plus(product, bias)

    def _quantise(self, source: str) -> tuple[Value, ...]:
        value = self._buffer(source)
        return tuple(QuantisedValue(value, role) for role in ROLES)

    def _matmul_integer(
        self, integers: str, weight: str, zero_point: str, weight_zero_point: str
    ) -> Value:
        value, zero = self._find(integers), self._find(zero_point)
        if not has_role(value, INTEGERS) or not has_role(zero, ZERO, value.source):
            raise GraphError("MatMulInteger of other integers")
        weight_KN = check_weights(self._constant(weight, np.int8), value.source)
        if self._constant(weight_zero_point, np.int8).any() or len(weight_KN) > MAX_INPUTS:
            raise GraphError("MatMulInteger with zero points, or too many inputs")
        return ProductValue(value.source, weight_KN, is_integer=True)

    def _cast(self, source: str, *, to: int) -> Value:
        if to == FLOAT and source in self._constants:
            return ConvertedValue(self._constant(source, np.int8))
        value = self._find(source)
        if to != FLOAT or not isinstance(value, ProductValue) or not value.is_integer:
            raise GraphError("Cast of other values")
        return replace(value, is_integer=False)

    def _einsum(self, shares: str, source: str, weights: str, *, equation: bytes) -> Value:
        """Returns the sum of the chosen experts' products, each times its expert's share."""
        given, value = self._buffer(shares), self._buffer(source)
        converted = self._values.get(weights)
        if isinstance(converted, ConvertedValue):
            weight_EKN = converted.array
        else:
            weight_EKN = self._constant(weights)
        is_fitting = weight_EKN.ndim == 3 and weight_EKN.shape[:2] == given.shape + value.shape
        if equation.replace(b" ", b"") != CHOSEN_PRODUCTS or not is_fitting or not weight_EKN.size:
            raise GraphError(
                f"Einsum of {given.shape}, {value.shape} and {weight_EKN.shape}, or of another form"
            )
        self._count_weights(weight_EKN)
        shape = weight_EKN.shape[2:]
        return self._apply(
            Code.CHOSEN,
            value,
            shape=shape,
            added=given,
            group=weight_EKN.itemsize,
            weight_NK=weight_EKN,
        )

    def _mul(self, first: str, second: str) -> Value:
        if first in self._constants:
            first, second = second, first
        value = self._find(first)
        if second not in self._constants:
            return self._scale(value, self._find(second))
        constant = self._constant(second)
        if has_role(value, SCALE) and value.scale_N is None and constant.ndim < 2:
            return replace(value, scale_N=constant.reshape(-1))
        source = self._buffer(first)
        return self._apply(Code.MULTIPLY_VECTOR, source, vector=expand(constant, source.shape))

    def _scale(self, product: Value, scale: Value) -> ProductValue:
        if isinstance(scale, ProductValue):
            product, scale = scale, product
        if not isinstance(product, ProductValue) or not has_role(scale, SCALE, product.source):
            raise GraphError("Mul of two values")
        is_open = not product.is_integer and not is_whole(product)
        if not is_open or scale.scale_N is None:
            raise GraphError("a scale of another product")
        return replace(product, scale_N=expand(scale.scale_N, product.shape))

    def _add(self, first: str, second: str) -> Value:
        if first in self._constants or is_whole(self._values.get(second)):
            first, second = second, first
        value = self._find(first)
        return self._plus(value if is_whole(value) else self._buffer(first), second)

    def _plus(self, value: Value, name: str) -> Value:
        """Returns a buffer or whole product, plus the constant or the value of a name."""
        if name in self._constants:
            vector = expand(self._constant(name), value.shape)
            if isinstance(value, ProductValue) and value.bias_N is None:
                return replace(value, bias_N=vector)
            return self._apply(Code.ADD_VECTOR, self._compute(value), vector=vector)
        other = self._buffer(name)
        if value.shape != other.shape:
            raise GraphError(f"Add of shapes {value.shape} and {other.shape}")
        if isinstance(value, ProductValue) and value.added is None:
            return replace(value, added=other)
        return self._apply(Code.ADD, self._compute(value), added=other)

    def _sub(self, first: str, second: str) -> Value:
        source = self._buffer(first)
        vector = expand(-self._constant(second), source.shape)
        return self._apply(Code.ADD_VECTOR, source, vector=vector)

    def _relu(self, source: str) -> Value:
        return self._apply(Code.RELU, self._buffer(source))

    def _sigmoid(self, source: str) -> Value:
        return self._apply(Code.SIGMOID, self._buffer(source))

    def _log_softmax(self, source: str, *, axis: int = -1) -> Value:
        value = self._buffer(source)
        if axis not in (-1, len(value.shape)):
            raise GraphError("LogSoftmax along another axis than the last")
        return self._apply(Code.LOG_SOFTMAX, value, group=value.shape[-1])

    def _reshape(self, source: str, sizes: str) -> Value:
        value = self._buffer(source)
        rows, *shape = self._integers(sizes) or [0]
        if rows != -1 or min(shape, default=0) < 1 or len(shape) > MAX_DIMENSIONS:
            raise GraphError("Reshape across rows")
        if math.prod(shape) != math.prod(value.shape):
            raise GraphError(f"Reshape of {value.shape} to {shape}")
        return BufferValue(value.number, tuple(shape))

    def _split(self, source: str, sizes: str, *, axis: int = 0) -> tuple[Value, ...]:
        value, widths = self._buffer(source), self._integers(sizes)
        if axis != 1 or (sum(widths),) != value.shape or min(widths) < 1:
            raise GraphError(f"Split of {value.shape} into {widths[:8]}, or along another axis")
        starts = np.cumsum([0, *widths[:-1]]).tolist()
        return tuple(
            self._make_buffer((width,), parent=value.number, first=start)
            for start, width in zip(starts, widths, strict=True)
        )

    OPERATORS: ClassVar[dict[str, Callable[..., Value | tuple[Value, ...]]]] = {
        "Add": _add,
        "Cast": _cast,
        "DynamicQuantizeLinear": _quantise,
        "Einsum": _einsum,
        "Gemm": _gemm,
        "LogSoftmax": _log_softmax,
        "MatMulInteger": _matmul_integer,
        "Mul": _mul,
        "Relu": _relu,
        "Reshape": _reshape,
        "Sigmoid": _sigmoid,
        "Split": _split,
        "Sub": _sub,
    }


CHOSEN_PRODUCTS = b"te,tk,ekn->tn"
"""Products of a token's numbers with the matrices of its experts, summed by its shares of them."""

GEMM_DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}

MAX_DIMENSIONS = 2
"""Those of a row: a number for each expert of each target layer."""


def is_name(name: object) -> TypeGuard[str]:
    """Returns whether it is a text; protobuf gives bytes that are not UTF-8 as bytes."""
    return isinstance(name, str) and name != ""


def has_role(
    value: Value, role: str, source: BufferValue | None = None
) -> TypeGuard[QuantisedValue]:
    """Returns whether the value is this output of DynamicQuantizeLinear, of `source` if given."""
    if not isinstance(value, QuantisedValue) or value.role != role:
        return False
    return source is None or value.source == source


def is_whole(value: Value | None) -> TypeGuard[ProductValue]:
    """Returns whether it is a product of float32 numbers, or of integers with their scales."""
    if not isinstance(value, ProductValue):
        return False
    return value.scale_N is not None or value.weight_KN.dtype == np.float32


def check_weights(weight_KN: NDArray, source: BufferValue) -> NDArray:
    if weight_KN.ndim != 2 or source.shape != (len(weight_KN),) or not weight_KN.size:
        raise GraphError(f"a product of {source.shape} and {weight_KN.shape}")
    return weight_KN


def expand(constant: NDArray, shape: tuple[int, ...]) -> Floats:
    """Returns the constant for every number of a row; one that depends on the row has no such."""
    try:
        whole = np.broadcast_to(constant, (1, *shape))
    except ValueError as error:
        raise GraphError(f"{constant.shape} next to rows of {shape}") from error
    return np.ascontiguousarray(whole.reshape(-1), np.float32)


def read_tensor(tensor: "onnx.TensorProto") -> NDArray:
    """Returns the numbers of a constant, which are in the graph itself."""
    from onnx import numpy_helper

    kinds = (FLOAT, INT8, INT64)
    if tensor.external_data or tensor.data_location or tensor.data_type not in kinds:
        raise GraphError(f"the tensor {tensor.name!r:.80} in another file, or of another type")
    if min(tensor.dims, default=0) < 0:
        raise GraphError(f"the tensor {tensor.name!r:.80} of a negative size")
    try:
        array = numpy_helper.to_array(tensor)
    except ValueError as error:
        raise GraphError(f"the tensor {tensor.name!r:.80} in part ({error})") from error
    if not np.isfinite(array).all():
        raise GraphError(f"infinities or NaN in the tensor {tensor.name!r:.80}")
    return array


def read_shape(value: "onnx.ValueInfoProto") -> Shape:
    """Returns the sizes of a value, the first of which is the name of the number of rows."""
    tensor = value.type.tensor_type
    rows, *sizes = [*tensor.shape.dim] or [None]
    if tensor.elem_type != FLOAT or not 1 <= len(sizes) <= MAX_DIMENSIONS:
        raise GraphError(f"{value.name!r:.80}, which is not rows of float32 numbers")
    widths = [size.dim_value for size in sizes]
    if rows.HasField("dim_value") or min(widths) < 1:
        raise GraphError(f"{value.name!r:.80}, which is not any number of rows of one size")
    return [rows.dim_param if is_name(rows.dim_param) else "?", *widths]


def read_attributes(node: "onnx.NodeProto") -> dict[str, Any]:
    from onnx import helper

    return {item.name: helper.get_attribute_value(item) for item in node.attribute}
