"""Stream tensors into safetensors files, holding one expert in memory at a time."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from predictors.files import sync_folder
from predictors.units import MIB
from runtime.store.base import as_memoryview
from runtime.store.files import FileReader
from runtime.store.safetensors_header import make_header
from runtime.tools.inflate.inflation_plan import TensorTarget

COPY_BYTES = 16 * MIB
"""Bytes read at a time of a copied tensor."""


def split_shards(
    targets: dict[str, TensorTarget], shard_bytes: int
) -> list[dict[str, TensorTarget]]:
    """Split the tensors in order into files of at most `shard_bytes`, or one larger tensor."""
    shards: list[dict[str, TensorTarget]] = [{}]
    size = 0
    for key, target in targets.items():
        if shards[-1] and size + target.num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = target
        size += target.num_bytes
    return shards


def shard_size(shard: dict[str, TensorTarget]) -> int:
    """Bytes of the whole file."""
    return len(make_header(shard)) + sum(target.num_bytes for target in shard.values())


def write_shard(
    path: Path, shard: dict[str, TensorTarget], reader: FileReader, advance: Callable[[int], None]
) -> None:
    """Write a file atomically.

    Raises:
        TransferError: the source could not be read.
        OSError: the disk is full or failed.
    """
    temporary = path.with_name(f"{path.name}.part")
    with temporary.open("wb") as file:
        file.write(make_header(shard))
        for piece in iterate_pieces(shard.values(), reader):
            file.write(piece)
            advance(len(piece))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def iterate_pieces(targets: Iterable[TensorTarget], reader: FileReader) -> Iterator[memoryview]:
    """Yield the tensors' bytes in order, one expert at a time for stacked experts."""
    for target in targets:
        source = target.source
        if target.axis is None:
            # The conversion is elementwise: cut anywhere.
            step = COPY_BYTES // source.dtype.itemsize * source.dtype.itemsize
            for start in range(0, source.num_bytes, step):
                raw = torch.empty(min(step, source.num_bytes - start), dtype=torch.uint8)
                reader.read(source.file, source.offset + start, as_memoryview(raw), what=source.key)
                yield as_memoryview(raw.view(source.dtype).to(target.dtype))
            continue
        stacked = len(source.shape) == 3
        for part in map(source.slice, range(source.shape[0])) if stacked else [source]:
            tensor = torch.empty(part.shape, dtype=part.dtype)
            reader.read(part.file, part.offset, as_memoryview(tensor), what=part.key)
            yield as_memoryview(target.grown(tensor, target.axis - 1 if stacked else target.axis))
