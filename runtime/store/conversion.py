"""Converts one expert's tensors of a checkpoint as Transformers' own operations do.

On a CPU, MXFP4 and FP8 matrices are dequantised here, to the bits that those operations make. They
look each number up by indexing, which PyTorch computes number by number, and transpose the result.
`index_select` of a table by byte is eight times as fast, and bytes are a quarter of what their
numbers are when they are transposed: an expert of gpt-oss-20b takes a tenth of the time.

Shape suffixes: R rows (outputs), C columns (inputs), G groups of a row, B bytes of a group.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from runtime.errors import CheckpointError, Fault, TransferError
from runtime.store.base import READERS
from runtime.store.tensor_index import StoredTensor
from runtime.store.weight_plan import WeightPlan

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of E2M1 without their sign (OCP Microscaling Formats 1.0, table 5); bit 3 is the sign."""
SCALE_BIAS = 127
"""A scale E is 2^(E - 127) (E8M0, section 5.4.1)."""
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
SCALE_ENDS = ("_scales", "_scale_inv")
"""Ends of the names of tensors of scales, in MXFP4 and FP8."""
E8M0_NAN = 255
CHUNK_ROWS = 128
"""Rows that are dequantised at a time, so that what is between fits in a core's cache."""

Dequantise = Callable[[list[Tensor]], Tensor]
"""Makes one expert's parameter of the checkpoint's tensors, in the order of the plan's sources."""


def require_finite_scales(scales: Tensor, name: str) -> None:
    """Raise TransferError for a scale that is no number, which would make nonsense of each answer.

    Args:
        scales: exponents of E8M0, also as uint8, of which the last stands for NaN; or numbers.
    """
    is_byte = scales.dtype.itemsize == 1
    good = scales.view(torch.uint8) != E8M0_NAN if is_byte else scales.isfinite()
    if not good.all():
        raise TransferError(f"{name}: a scale is not finite; fetch it again", fault=Fault.DAMAGED)


def find_dequantiser(plan: WeightPlan) -> Dequantise | None:
    """Return what dequantises the plan's tensors; None if Transformers' operations have to."""
    if plan.operations == ["Mxfp4Dequantize"]:
        return _find_mxfp4(plan)
    if plan.operations[:1] == ["Fp8Dequantize"]:
        return _find_fp8(plan)
    return None


def _find_mxfp4(plan: WeightPlan) -> Dequantise | None:
    ends = [name.rpartition("_")[2] for name in plan.sources]
    if sorted(ends) != ["blocks", "scales"]:
        return None
    at, scales_at = ends.index("blocks"), ends.index("scales")
    blocks, scales = plan.extents(0)[at], plan.extents(0)[scales_at]
    if (len(blocks.shape), blocks.dtype, scales.dtype) != (3, torch.uint8, torch.uint8):
        return None
    dtype = plan.parameter.dtype
    return lambda tensors: dequantise_mxfp4(tensors[at], tensors[scales_at], dtype)


def _find_fp8(plan: WeightPlan) -> Dequantise | None:
    assert plan.converter is not None
    if not plan.joins_experts(plan.operations[1:]):
        return None
    found = dict(zip(plan.sources, plan.extents(0), strict=True))
    scales = {name: f"{name}_scale_inv" for name in found if not name.endswith("_scale_inv")}
    if {*scales, *scales.values()} != set(found):
        return None
    for name, scale_name in scales.items():
        weight, scale = found[name], found[scale_name]
        divides = len(weight.shape) == len(scale.shape) == 2 and not (
            weight.shape[0] % scale.shape[0] or weight.shape[1] % scale.shape[1]
        )
        if weight.dtype not in FP8_DTYPES or scale.dtype not in SCALE_DTYPES or not divides:
            return None
        if find_smaller_blocks(
            weight.shape, scale.shape, _read_block(plan.converter.operations[0])
        ):
            return None
    rows = [found[name].shape[0] for name in scales]
    columns, dtype = found[next(iter(scales))].shape[1], plan.parameter.dtype

    def dequantise(tensors: list[Tensor]) -> Tensor:
        given = dict(zip(found, tensors, strict=True))
        result_RC = torch.empty(sum(rows), columns, dtype=dtype)
        for name, part_RC in zip(scales, result_RC.split(rows), strict=True):
            dequantise_fp8(given[name], given[scales[name]], part_RC)
        return result_RC

    return dequantise


def read_smaller_blocks(weight_mapping: Iterable[WeightRenaming | WeightConverter]) -> None:
    """Make Transformers' FP8 operations read matrices whose last block is smaller.

    DeepSeek-V3's `kv_a_proj_with_mqa` has 576 rows in blocks of 128. The library divides a matrix
    into as many blocks of equal size as there are scales: it takes 96 of 192 rows for each of two
    scales, without a word, and rejects five scales for 576 rows.
    """
    for converter in weight_mapping:
        for operation in getattr(converter, "operations", ()):
            if isinstance(operation, Fp8Dequantize):
                operation._dequantize_one = partial(
                    _dequantise_smaller_blocks, operation._dequantize_one, _read_block(operation)
                )


def _read_block(operation: Fp8Dequantize) -> Sequence[int]:
    """Return rows and columns of a block of FP8 scales; empty if a matrix has one scale."""
    return operation.hf_quantizer.quantization_config.weight_block_size or ()


def _dequantise_smaller_blocks(
    dequantise: Callable[..., Tensor],
    block: Sequence[int],
    weight: Tensor,
    scales: Tensor,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Dequantise with a scale for each row or column, where the last block is a smaller one."""
    for axis in find_smaller_blocks(weight.shape, scales.shape, block):
        scales = scales.repeat_interleave(block[axis], axis).narrow(axis, 0, weight.shape[axis])
    return dequantise(weight, scales, output_dtype)


def find_smaller_blocks(
    weight: Sequence[int], scales: Sequence[int], block: Sequence[int]
) -> list[int]:
    """Return the axes (-2: rows, -1: columns) whose last block of scales is a smaller one.

    Args:
        weight: shape of a matrix, as `scales` is of its scales.
        block: rows and columns of a block; empty if a matrix has one scale.
    """
    return [
        axis
        for axis, side in zip((-2, -1), block, strict=False)
        if weight[axis] % side and 1 < scales[axis] == -(-weight[axis] // side)
    ]


@cache
def _fp4_table(dtype: torch.dtype, shift: int) -> Tensor:
    """Return the number in the low (shift 0) or high (shift 4) half of each byte, `[256]`."""
    values = [*FP4_VALUES, *(-value for value in FP4_VALUES)]
    return torch.tensor([values[byte >> shift & 15] for byte in range(256)], dtype=dtype)


@cache
def _fp8_table(dtype: torch.dtype) -> Tensor:
    """Return the number of each byte, `[256]` in float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def dequantise_mxfp4(blocks_RGB: Tensor, scales_RG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[C, R]`, transposed as gpt-oss computes with it; C = 2 G B.

    Numbers times powers of two are exact, so that the order of operations changes no bit.

    Args:
        blocks_RGB: two numbers in each byte, the first in its low half.
        scales_RG: uint8, an exponent for each group.
    """
    num_rows, num_groups, num_bytes = blocks_RGB.shape
    index = blocks_RGB.view(num_rows, -1).t().contiguous().view(-1).int()
    result = torch.empty(num_groups * num_bytes, 2, num_rows, dtype=dtype)
    for half, shift in enumerate((0, 4)):
        numbers = torch.index_select(_fp4_table(dtype, shift), 0, index)
        result[:, half] = numbers.view(-1, num_rows)
    scales_GR = torch.pow(2.0, scales_RG.t().int() - SCALE_BIAS)
    if dtype is torch.bfloat16:
        scales_GR = scales_GR.to(dtype)  # whose exponents are those of float32
    result.view(num_groups, 2 * num_bytes, num_rows).mul_(scales_GR.contiguous().unsqueeze(1))
    return result.view(-1, num_rows)


def dequantise_fp8(weight_RC: Tensor, scales: Tensor, result_RC: Tensor) -> None:
    """Write numbers times their block's scale, multiplied in float32, to `result_RC`.

    Args:
        scales: one for each block of `R / rows` times `C / columns` numbers.
    """
    num_rows, num_columns = weight_RC.shape
    scale_rows, scale_columns = scales.shape
    height, width = num_rows // scale_rows, num_columns // scale_columns
    table, bytes_RC = _fp8_table(weight_RC.dtype), weight_RC.view(torch.uint8)
    at_once = max(1, CHUNK_ROWS // height)
    for first in range(0, scale_rows, at_once):
        scale = scales[first : first + at_once].float().repeat_interleave(width, dim=1)
        part = slice(first * height, (first + len(scale)) * height)
        index = bytes_RC[part].reshape(-1).int()
        numbers = torch.index_select(table, 0, index).view(len(scale), height, num_columns)
        numbers.mul_(scale.unsqueeze(1))
        result_RC[part] = numbers.view(-1, num_columns)


class _OneExpertModel:
    """Presents a fused parameter with a single expert to Transformers' conversion operations."""

    def __init__(self, model: PreTrainedModel, plan: WeightPlan):
        self._model = model
        self._plan = plan

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def get_parameter_or_buffer(self, name: str) -> Tensor:
        parameter = self._plan.parameter
        if name == parameter.target:
            return torch.empty((1, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
        return self._model.get_parameter_or_buffer(name)

    get_parameter = get_parameter_or_buffer


class ExpertConversion:
    """Makes one expert's part of a parameter of the tensors that the checkpoint has for it."""

    def __init__(self, model: PreTrainedModel, plan: WeightPlan):
        self._model = model
        self.plan = plan
        self._dequantise = find_dequantiser(plan)

    @property
    def key(self) -> tuple[object, ...]:
        """Sizes on which the memory of a conversion depends."""
        kinds = [extent.kind for extents in self.plan.kinds for extent in extents]
        return (*self.plan.operations, *kinds, self.plan.parameter.dtype)

    @torch.no_grad()
    def convert(self, tensors: list[Tensor]) -> Tensor:
        """Return the parameter's values; takes the tensors out of their list.

        Cast first where the library casts first; quantised storage never before the library's
        dequantisation has seen it.

        Raises:
            CheckpointError: the operations make something else than the parameter.
            TransferError: a scale of the quantised numbers is not finite.
        """
        plan = self.plan
        converter, parameter = plan.converter, plan.parameter
        assert converter is not None
        for name, tensor in zip(plan.sources, tensors, strict=True):
            # On a device the answer would make each layer wait.
            if name.endswith(SCALE_ENDS) and tensor.device.type == "cpu":
                require_finite_scales(tensor, f"{parameter.target}, {name}")
        if self._dequantise is not None and tensors[0].device.type == "cpu":
            dequantised = self._dequantise(tensors)
            tensors.clear()
            return dequantised
        values: dict[str, Any] = {}
        for pattern in plan.sources:
            tensor = tensors.pop(0)
            if plan.casts_first:
                tensor = tensor.to(parameter.dtype)
            # An operation on a fused tensor is given one with a single expert.
            values[pattern] = [tensor if plan.is_per_expert else tensor.unsqueeze(0)]
            del tensor
        for operation in converter.operations:
            values = operation.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=parameter.target,
                model=_OneExpertModel(self._model, plan),
                config=self._model.config,
                missing_keys=None,
            )
        result = next(iter(values.values()))
        result = result[0] if isinstance(result, list) else result
        if result.shape not in (parameter.shape[1:], (1, *parameter.shape[1:])):
            raise CheckpointError(
                f"{parameter.target}: the library's {', '.join(plan.operations)} make "
                f"{tuple(result.shape)} of one expert, not {parameter.shape[1:]}"
            )
        return result.detach()

    def decode(self, tensors: list[Tensor]) -> Tensor:
        """Return the parameter as `convert` makes it, in its own shape and dtype."""
        parameter = self.plan.parameter
        result = self.convert(tensors).to(parameter.dtype)
        return result.reshape(parameter.shape[1:]).contiguous()

    def measure_reads(self) -> int:
        """Return the memory that `READERS` reads take, of which one converts at a time.

        The others may have read their tensors already.

        Raises:
            CheckpointError: the operations cannot read these tensors.
        """
        most = 0
        for extents in self.plan.kinds:
            loading = sum(extent.measure_filling() for extent in extents)
            converting = self._measure(self.convert, extents)
            most = max(most, (READERS - 1) * loading + max(loading, converting))
        return most

    def measure_decoding(self) -> int:
        """Return the memory that `decode` takes besides its tensors, its result included.

        Raises:
            CheckpointError: as `measure_reads`.
        """
        extents = self.plan.extents(0)
        # Of a copy of the list: a slot holds the tensors until the end.
        most = self._measure(lambda tensors: self.decode([*tensors]), extents)
        return most - sum(extent.num_bytes for extent in extents)

    def _measure(
        self, compute: Callable[[list[Tensor]], object], extents: Sequence[StoredTensor]
    ) -> int:
        plan = self.plan
        try:
            return measure_peak_bytes(lambda: compute([_zeros(extent) for extent in extents]))
        except (ValueError, RuntimeError, IndexError, AssertionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{plan.parameter.target}: the library's {', '.join(plan.operations)} cannot "
                f"read this checkpoint's {', '.join(plan.sources)}: {error}"
            ) from error


def _zeros(extent: StoredTensor) -> Tensor:
    raw = torch.zeros(extent.num_bytes, dtype=torch.uint8)  # no dtype's own zeros needed
    return raw.view(extent.dtype).view(extent.shape)


class _Live(TorchDispatchMode):
    """Counts bytes of live tensors that are created within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            if not tensor.is_meta:
                self._count(tensor.untyped_storage())
        within = _bytes_within(function, args)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes + within)
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._live_bytes += size

        def freed(_: object) -> None:
            self._live_bytes -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, freed)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes_within(function: Any, args: tuple) -> int:
    """Memory of kernels: indexing converts 32-bit indices to 64-bit ones."""
    if function is not torch.ops.aten.index.Tensor:
        return 0
    return sum(8 * t.numel() for t in _tensors(args[1]) if t.dtype == torch.int32)


def measure_peak_bytes(computation: Callable[[], object]) -> int:
    """Runs the computation; the most bytes that its tensors took at one moment.

    Each allocation counts in full, from the operation that makes it until the last tensor that
    shows it is gone. The test compares it with the allocator's own account.
    """
    live = _Live()
    with live:
        computation()
    return live.peak_bytes
