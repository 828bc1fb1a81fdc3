"""Tensors in safetensors files as byte ranges, read without mapping the file, and new headers.

A mapped file turns an I/O error or a truncation into the death of the process (SIGBUS); `pread`
makes it an exception.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.store.base import as_memoryview
from runtime.store.files import FileReader
from runtime.store.model_check import MAX_HEADER_BYTES
from runtime.store.packed.coding import RAW, Coding

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}

MAX_DIMENSIONS = 64
"""As many as PyTorch's operators take; far above any weight's."""


@dataclass(frozen=True)
class StoredTensor:
    """The byte range of one tensor in a file of weights."""

    file: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    key: str

    @property
    def kind(self) -> tuple[object, ...]:
        """Its shape and dtype, which decide how it is read, wherever it is."""
        return self.shape, self.dtype

    def slice(self, index: int) -> "StoredTensor":
        """The `index`-th part along the first dimension."""
        size = self.num_bytes // self.shape[0]
        return replace(
            self,
            offset=self.offset + index * size,
            num_bytes=size,
            shape=self.shape[1:],
            key=f"{self.key}[{index}]",
        )

    def choose_coding(self) -> Coding:
        """Return how a slot holds the tensor, where it may hold blocks of a GGUF type."""
        return RAW

    def is_stored_as(self, coding: Coding, dtype: torch.dtype) -> bool:
        """Return whether the file has the bytes of this coding, or without one of this dtype."""
        return coding != RAW or self.dtype == dtype

    def fill(self, files: FileReader, target: Tensor, coding: Coding, dtype: torch.dtype) -> None:
        """Fill `target`, uint8, with the tensor as the coding has it, or cast to the dtype."""
        if self.is_stored_as(coding, dtype):
            self.read(files, target)
        else:
            target.view(dtype).copy_(self.load(files).reshape(-1))

    def measure_filling(self, _coding: Coding = RAW) -> int:
        """Return the memory that `fill` takes where the file has other bytes, as `load` does."""
        return self.num_bytes

    def read(self, files: FileReader, target: Tensor) -> None:
        """Fill `target`, of as many bytes; raises TransferError."""
        files.read(self.file, self.offset, as_memoryview(target), what=self.key)

    def load(self, files: FileReader) -> Tensor:
        """Read the tensor; raises TransferError."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read(files, tensor)
        return tensor


def read_tensor_index(files: Sequence[str | Path]) -> dict[str, StoredTensor]:
    """Return every tensor of the files by name.

    Raises:
        CheckpointError: a header is damaged or unreadable, or a file is shorter than it says.
    """
    extents: dict[str, StoredTensor] = {}
    for file in map(Path, files):
        try:
            extents.update(_read_header(file))
        except OSError as error:
            raise CheckpointError(
                f"{file}: cannot be read ({error}); check the disk, or fetch the file again"
            ) from error
    return extents


def _read_header(file: Path) -> dict[str, StoredTensor]:
    # A pipe in place of a file would be waited for.
    if not file.is_file():
        raise CheckpointError(f"{file} is missing or not a plain file; fetch it again")
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{file}: not a safetensors file ({size} bytes); fetch it again")
        raw = handle.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_refuse_repeated)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: its header is damaged ({error}); fetch it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is no JSON object; fetch it again")
    header.pop("__metadata__", None)
    start = 8 + length
    extents = {key: _read_entry(file, key, value, start) for key, value in header.items()}
    for key, stored in extents.items():
        if (end := stored.offset + stored.num_bytes) > size:
            raise CheckpointError(
                f"{file}: truncated: {key} ends at byte {end}, the file has {size}; fetch it again"
            )
    return extents


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object; raises ValueError for a key that occurs twice."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{Counter(keys).most_common(1)[0][0]!r:.200} occurs twice")
    return entries


def _read_entry(file: Path, key: str, value: Any, start: int) -> StoredTensor:
    """Returns the byte range of a tensor, checked against its dtype and shape.

    Raises:
        CheckpointError: the message names the file and the tensor.
    """
    fields = value if isinstance(value, dict) else {}
    dtype = fields.get("dtype")
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None:
        raise CheckpointError(
            f"{file}: its header is damaged: {key:.200} needs dtype, shape and data_offsets; "
            "fetch it again"
        )
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: {key:.200} has the dtype {dtype:.200}; those known are {', '.join(DTYPES)}"
        )
    is_possible = len(shape) <= MAX_DIMENSIONS and max((*shape, *offsets), default=0) < 2**63
    # A product of other numbers could take for ever.
    needed = math.prod(shape) * DTYPES[dtype].itemsize if is_possible else None
    if needed is None or len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise CheckpointError(
            f"{file}: its header is damaged: {key:.200} of shape {shape!s:.200} and dtype {dtype} "
            f"does not take the bytes between its data_offsets {offsets!s:.200}; fetch it again"
        )
    return StoredTensor(file, start + offsets[0], needed, DTYPES[dtype], tuple(shape), key)


def _counts(values: Any) -> list[int] | None:
    """Returns a list of integers from zero on; None for anything else."""
    if isinstance(values, list) and all(type(value) is int and value >= 0 for value in values):
        return values
    return None


NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_ALIGNMENT = 64
"""Alignment of the data; the format requires 8."""


class SizedTensor(Protocol):
    """A tensor whose bytes follow the header."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def num_bytes(self) -> int: ...


def make_header(shard: Mapping[str, SizedTensor]) -> bytes:
    """Make the length and the header at the beginning of a file of these tensors, in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in shard.items():
        begin, end = end, end + tensor.num_bytes
        header[key] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
