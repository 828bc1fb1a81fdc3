"""One expert from its parameters to the bytes of its record."""

import torch
import xxhash
from torch import Tensor

from runtime.store.base import as_memoryview
from runtime.store.packed.coding import RAW, encode
from runtime.store.packed.layout import PackedLayout
from runtime.store.packed.quantise import quantise


def fill_record(layout: PackedLayout, weights: dict[str, Tensor], record: Tensor) -> None:
    """Lays the parameters out in `record`, uint8 `(num_bytes,)`; what is between them is zero."""
    record.zero_()
    for part in layout.parts:
        flat = weights[part.parameter].reshape(-1)[part.first : part.first + part.num_weights]
        if part.coding == RAW:
            end = part.offset + part.bytes_as(flat.dtype)
            record[part.offset : end].copy_(flat.view(torch.uint8))
        else:
            encode(part.coding, quantise(part.coding, flat), record[part.offset :])


def checksums_of(layout: PackedLayout, record: Tensor) -> list[int]:
    """xxh3_64 of each chunk, padding included."""
    view = as_memoryview(record)
    return [xxhash.xxh3_64_intdigest(view[a:b]) for [(a, b)] in layout.chunk_ranges]
