"""Tensors in safetensors files as byte ranges, read without mapping the file, and new headers.

A mapped file turns an I/O error or a truncation into the death of the process (SIGBUS); `pread`
makes it an exception.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from runtime.errors import CheckpointError

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
    """The byte range of one tensor in a safetensors file."""

    file: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    key: str

    def slice(self, index: int) -> "StoredTensor":
        """The `index`-th part along the first dimension."""
        size = self.num_bytes // self.shape[0]
        key = f"{self.key}[{index}]"
        return StoredTensor(
            self.file, self.offset + index * size, size, self.dtype, self.shape[1:], key
        )

    def view(self, shape: tuple[int, ...]) -> "StoredTensor":
        """Return the same bytes with another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self.key, self.shape, shape)
        return replace(self, shape=shape)


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
    try:
        # The library checks every entry, and that they cover the file.
        with safe_open(file, framework="pt", backend="pread"), file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: truncated, damaged or no safetensors file ({str(error):.300}); fetch it again"
        ) from error
    header.pop("__metadata__", None)
    extents = {}
    for key, entry in header.items():
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS:
            raise CheckpointError(
                f"{file}: {key:.200} has the dtype {dtype} and {len(shape)} dimensions; read are "
                f"{', '.join(DTYPES)}, of up to {MAX_DIMENSIONS}"
            )
        extents[key] = StoredTensor(
            file, 8 + length + start, end - start, DTYPES[dtype], tuple(shape), key
        )
    return extents


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
