"""Headers of safetensors files that are written tensor by tensor."""

import json
import struct
from collections.abc import Mapping
from typing import Protocol

import torch

from runtime.store.tensor_index import DTYPES

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
