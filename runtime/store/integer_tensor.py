"""Weights and experts stored as packed integers: GPTQ, AWQ and compressed-tensors.

Each is `w = (q - zero) * scale`, with a scale and a zero point for each group of consecutive
weights of a row. What differs is the order of the integers in the file. Groups of whole 32 weights
lie in slots as blocks of GGUF's types, integer by integer: symmetric ones as Q8_0 and Q4_0, with
their scale, others as Q4_1, `w = q * scale + minimum` with the minimum `-zero * scale`. Scales and
minima are float16 there: float16 scales stay what they are, bfloat16 ones too from 2 ** -14 on; a
minimum is rounded.

Shape suffixes: N rows (outputs), K columns (inputs), G groups of a row, P numbers in 32 bits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import CheckpointError, Fault, TransferError
from runtime.store.conversion import measure_peak_bytes
from runtime.store.files import FileReader
from runtime.store.integer_scheme import IntegerScheme
from runtime.store.packed.coding import RAW, Coding
from runtime.store.tensor_index import StoredTensor

PARTS = {
    "compressed-tensors": {
        **{"weight_packed": "values", "weight_scale": "scales", "weight_zero_point": "zeros"},
        **{"weight_g_idx": "order", "weight_shape": ""},
    },
    **dict.fromkeys(
        ("gptq", "awq"),
        {"qweight": "values", "scales": "scales", "qzeros": "zeros", "g_idx": "order"},
    ),
}
"""Tensors of a weight by the end of their name: parts of the weight, empty if it is not read."""
BLOCK = 32
"""Weights of a block of GGUF's types for integers."""
TRANSPOSITION_BYTES = 120 * 120
"""A block through which PyTorch transposes a copy of any size."""


@dataclass(frozen=True)
class UnpackedWeight:
    """A weight's integers, one to a byte."""

    values_NK: Tensor
    """uint8, from 0."""
    scales_NG: Tensor
    zeros_NG: Tensor
    """uint8."""

    def dequantise(self) -> Tensor:
        """Return the weights `(N, K)` in the scales' dtype, rounded once, as the libraries do."""
        dtype = self.scales_NG.dtype
        num_rows, num_groups = self.scales_NG.shape
        groups = self.values_NK.to(dtype).view(num_rows, num_groups, -1)
        groups.sub_(self.zeros_NG.to(dtype)[..., None]).mul_(self.scales_NG[..., None])
        return groups.view(num_rows, -1)


@dataclass(frozen=True)
class IntegerTensor(StoredTensor):
    """A weight `(N, K)`, as if the checkpoint had it in the dtype of its scales."""

    parts: Mapping[str, StoredTensor]
    scheme: IntegerScheme
    num_groups: int
    """Groups of a row."""

    @property
    def stored_names(self) -> list[str]:
        """Names of the tensors that the checkpoint has in place of the weight, read or not."""
        module = self.key.rpartition(".")[0]
        return [f"{module}.{part}" for part in PARTS[self.scheme.method]]

    @property
    def kind(self) -> tuple[object, ...]:
        return *super().kind, self.num_groups

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.num_groups

    def slice(self, index: int) -> StoredTensor:  # noqa: ARG002
        raise CheckpointError(
            f"{self.key}: packed integers of several experts in one tensor are not served"
        )

    def choose_coding(self) -> Coding:
        """Return how a slot holds the weight.

        Weights that no block holds are dequantised while they are read.
        """
        if self.group_size % BLOCK or (self.scheme.bits == 8 and not self.scheme.is_symmetric):
            return RAW
        if self.scheme.bits == 8:
            return Coding("Q8_0")
        return Coding("Q4_0" if self.scheme.is_symmetric else "Q4_1")

    def is_stored_as(self, _coding: Coding, _dtype: torch.dtype) -> bool:
        return False

    def fill(self, files: FileReader, target: Tensor, coding: Coding, dtype: torch.dtype) -> None:
        if coding == RAW:
            super().fill(files, target, coding, dtype)
        else:
            weight = self._unpack(self._read_parts(files))
            middle = 1 << (self.scheme.bits - 1)
            if self.scheme.is_symmetric and (weight.zeros_NG != middle).any():
                raise self._damaged(
                    f"its zero points are not {middle}, although the checkpoint's "
                    "configuration says that it is symmetric"
                )
            target.copy_(self._repack(weight, coding))

    def load(self, files: FileReader) -> Tensor:
        """Read and dequantise the weight; raises TransferError."""
        return self._unpack(self._read_parts(files)).dequantise()

    def measure_filling(self, coding: Coding = RAW) -> int:
        def run() -> None:
            parts = self.parts.items()
            weight = self._unpack({n: torch.zeros(p.shape, dtype=p.dtype) for n, p in parts})
            if coding == RAW:
                weight.dequantise()
            else:
                self._repack(weight, coding)

        return TRANSPOSITION_BYTES + measure_peak_bytes(run)

    def _read_parts(self, files: FileReader) -> dict[str, Tensor]:
        """Read integers, scales and zero points; raises TransferError.

        A scale that is no number, or weights in groups by another order than theirs, would make
        nonsense of each answer without a word.
        """
        read = {name: part.load(files) for name, part in self.parts.items()}
        if not read["scales"].isfinite().all():
            raise self._damaged("a scale is not finite")
        groups = read.pop("order", None)
        if groups is not None:
            in_order = torch.arange(self.num_groups).repeat_interleave(self.group_size)
            if not torch.equal(groups.long(), in_order):
                raise self._damaged(
                    "its g_idx has groups of weights that are not consecutive (desc_act), although "
                    "the checkpoint's configuration says that it has none"
                )
        return read

    def _repack(self, weight: UnpackedWeight, coding: Coding) -> Tensor:
        """Return the weight as blocks of a GGUF type, uint8."""
        scales_NG = weight.scales_NG.float()
        numbers = [scales_NG]
        if coding.kind == "Q4_1":
            numbers.append(weight.zeros_NG.float().neg_().mul_(scales_NG))
        repeats = self.group_size // BLOCK
        numbers_BX = torch.stack(numbers, -1).half().repeat_interleave(repeats, 1).flatten(0, 1)
        if not numbers_BX.isfinite().all():
            raise self._damaged("a scale is no number of float16")
        values_BS = weight.values_NK.view(-1, BLOCK)
        if self.scheme.bits == 8:
            values_BS = values_BS ^ 128
        else:
            values_BS = values_BS[:, : BLOCK // 2] | values_BS[:, BLOCK // 2 :] << 4
        return torch.cat([numbers_BX.contiguous().view(torch.uint8), values_BS], 1).view(-1)

    def _damaged(self, reason: str) -> TransferError:
        return TransferError(f"{self.key}: {reason}; fetch it again", fault=Fault.DAMAGED)

    def _unpack(self, parts: dict[str, Tensor]) -> UnpackedWeight:
        num_rows, method = self.shape[0], self.scheme.method
        packed, scales, zeros = parts["values"], parts["scales"], parts.get("zeros")
        if method == "compressed-tensors":
            scales = scales.reshape(-1, self.num_groups).expand(num_rows, -1)
            # Zero points are packed along the rows.
            zeros = None if zeros is None else zeros.t().contiguous()
        else:
            scales = scales.t()
        if method == "gptq":
            # Eight (or four) rows of the transposed weight in each integer.
            packed = packed.t().contiguous()
        values_NK, scales_NG = self._unpack_rows(packed), scales.contiguous()
        if method == "awq":
            values_NK = values_NK.t().contiguous()
        if zeros is None:
            middle = 1 << (self.scheme.bits - 1)
            zeros_NG = torch.full_like(scales_NG, middle, dtype=torch.uint8)
        else:
            zeros_NG = self._unpack_rows(zeros)[:, :num_rows].t() + self.scheme.zero_offset
        return UnpackedWeight(values_NK, scales_NG, zeros_NG.contiguous())

    def _unpack_rows(self, packed: Tensor) -> Tensor:
        """Return the numbers of int32 `(rows, columns / P)`, the lowest bits first, uint8."""
        stored = packed.view(torch.uint8)
        if self.scheme.bits == 8:
            return stored
        values = torch.stack([stored & 15, stored >> 4], dim=-1)
        if self.scheme.method == "awq":
            # The four even ones of eight columns come before the odd ones.
            values = values.view(len(stored), -1, 2, 4).transpose(2, 3)
        return values.reshape(len(stored), -1)


def view_integers(
    tensors: Mapping[str, StoredTensor], scheme: IntegerScheme
) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors, each group of packed ones as the weight that it stands for.

    Raises:
        CheckpointError: a part is missing, or its shape or dtype does not fit the others.
    """
    names = PARTS[scheme.method]
    suffixes = tuple(f".{name}" for name in names)
    viewed = {name: tensor for name, tensor in tensors.items() if not name.endswith(suffixes)}
    packed = [name for name in tensors if name.endswith(suffixes)]
    for module in dict.fromkeys(name.rpartition(".")[0] for name in packed):
        needs_zeros = scheme.method != "compressed-tensors" or not scheme.is_symmetric
        parts: dict[str, StoredTensor] = {}
        for name, part in names.items():
            tensor = tensors.get(f"{module}.{name}")
            if tensor is not None and part:
                parts[part] = tensor
            elif part in ("values", "scales") or (part == "zeros" and needs_zeros):
                raise CheckpointError(
                    f"{module}.{name} is missing from the checkpoint; fetch the model again"
                )
        viewed[f"{module}.weight"] = _join(f"{module}.weight", parts, scheme)
    return viewed


def _join(key: str, parts: dict[str, StoredTensor], scheme: IntegerScheme) -> IntegerTensor:
    values, scales, zeros = parts["values"], parts["scales"], parts.get("zeros")
    per_word = 32 // scheme.bits
    if len(values.shape) != 2 or values.dtype != torch.int32:
        raise _explain(values, "is not a matrix of int32")
    if not 1 <= len(scales.shape) <= 2 or scales.dtype not in (
        torch.float16, torch.bfloat16, torch.float32,
    ):  # fmt: skip
        raise _explain(scales, "is no matrix of float16, bfloat16 or float32")
    # Libraries but compressed-tensors store all matrices transposed.
    way = 1 if scheme.method == "compressed-tensors" else -1
    rows, columns = values.shape[::way]
    is_awq = scheme.method == "awq"
    shape = (rows * per_word, columns) if is_awq else (rows, columns * per_word)
    scales_shape = scales.shape[::way]
    is_matched = len(scales_shape) == 2 and scales_shape[0] == shape[0]
    if way == 1:
        is_matched = scales_shape[0] == shape[0] or math.prod(scales_shape) == 1
    groups = scales_shape[1] if len(scales_shape) == 2 else 1
    zeros_shape = (-(-shape[0] // per_word), groups)[::way]
    if not is_matched or not groups or shape[1] % groups:
        raise _explain(scales, f"does not fit {values.key}, {values.shape}")
    if "order" in parts and parts["order"].shape != (shape[1],):
        raise _explain(parts["order"], f"is no list of {shape[1]} groups")
    if zeros is not None and (zeros.shape != zeros_shape or zeros.dtype != torch.int32):
        raise _explain(zeros, f"is not {zeros_shape} of int32")
    size = math.prod(shape) * scales.dtype.itemsize
    place = values.file, values.offset, size
    return IntegerTensor(*place, scales.dtype, shape, key, parts, scheme, groups)


def _explain(tensor: StoredTensor, what: str) -> CheckpointError:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return CheckpointError(
        f"{tensor.file}: {tensor.key}, {tensor.shape} of {dtype}, {what}; fetch it again"
    )
