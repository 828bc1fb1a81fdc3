"""Tensors in safetensors files as byte ranges, read without mapping the file.

A mapped file turns an I/O error or a truncation into the death of the process (SIGBUS); `pread`
makes it an exception.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

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

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""


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
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{file}: not a safetensors file ({size} bytes); fetch it again")
        raw = handle.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: its header is damaged ({error}); fetch it again") from error
    start = 8 + length
    header.pop("__metadata__", None)
    extents = {}
    for key, value in header.items():
        begin, end = value["data_offsets"]
        if start + end > size:
            raise CheckpointError(
                f"{file}: truncated: {key} ends at byte {start + end}, the file has {size}; "
                "fetch it again"
            )
        if value["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{file}: {key} has the dtype {value['dtype']}; those known are {', '.join(DTYPES)}"
            )
        extents[key] = StoredTensor(
            file, start + begin, end - begin, DTYPES[value["dtype"]], tuple(value["shape"]), key
        )
    return extents
