"""Writes a model without its experts: with a packed store, it is all that serving needs."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from predictors.files import sync_folder, write_atomic
from predictors.units import MIB
from runtime.errors import CheckpointError
from runtime.store.base import as_memoryview
from runtime.store.files import FileReader
from runtime.store.hub_snapshot import PATTERNS
from runtime.store.model_check import WEIGHTS_INDEX
from runtime.store.model_source import (
    DIGESTS,
    WITHOUT_EXPERTS,
    describe_without_experts,
    fingerprint,
    has_no_experts,
    is_weights,
    list_weight_files,
)
from runtime.store.tensor_index import (
    SizedTensor,
    StoredTensor,
    make_header,
    read_tensor_index,
)

COPY_BYTES = 16 * MIB
"""Bytes read at a time."""
SLACK_BYTES = 64 * MIB
"""Room for headers, configuration and tokenizer."""


def write_dense_folder(
    source: Path, output: Path, *, experts: Iterable[str], origin: Mapping[str, str]
) -> int:
    """Copy a checkpoint without its experts' tensors, atomically, or find the copy there.

    Args:
        experts: names of the tensors that only experts are made of.
        origin: `identity` of the whole checkpoint.

    Returns:
        Bytes of the weights that are not experts.

    Raises:
        CheckpointError: something else is at `output`, or the disk has no room.
        TransferError: the checkpoint cannot be read.
    """
    dropped = set(experts)
    shards: dict[str, dict[str, StoredTensor]] = {}
    for key, stored in read_tensor_index(list_weight_files(source)).items():
        if key not in dropped:
            shards.setdefault(stored.file.name, {})[key] = stored
    num_bytes = sum(stored.num_bytes for shard in shards.values() for stored in shard.values())
    whole = fingerprint(source)
    if output.exists():
        if not has_no_experts(output) or fingerprint(output) != whole:
            raise CheckpointError(
                f"{output} exists and is not this model without its experts; choose another "
                "dense_output=PATH"
            )
        return num_bytes
    output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output.parent).free
    if free < num_bytes + SLACK_BYTES:
        raise CheckpointError(
            f"no room for {output}: {num_bytes} bytes are needed, the disk has {free} free; choose "
            "another dense_output=PATH, or make room"
        )
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    reader = FileReader()
    try:
        for name, shard in shards.items():
            pieces = (piece for stored in shard.values() for piece in read_pieces(stored, reader))
            write_tensors(partial / name, shard, map(as_memoryview, pieces))
    finally:
        reader.close()
    if (source / WEIGHTS_INDEX).is_file():
        listed = {key: name for name, shard in shards.items() for key in shard}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": listed}
        write_atomic(partial / WEIGHTS_INDEX, json.dumps(index, indent=1).encode())
    for file in {file for pattern in PATTERNS for file in source.glob(pattern)}:
        # Digests are those of the whole checkpoint's files.
        if not is_weights(file.name) and file.name not in (WEIGHTS_INDEX, DIGESTS):
            shutil.copyfile(file, partial / file.name)
    record = describe_without_experts(partial, fingerprint=whole, origin=origin)
    write_atomic(partial / WITHOUT_EXPERTS, json.dumps(record, indent=1).encode())
    partial.replace(output)
    sync_folder(output.parent)
    return num_bytes


def write_tensors(
    path: Path,
    shard: Mapping[str, SizedTensor],
    pieces: Iterable[memoryview],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a safetensors file atomically.

    Args:
        pieces: the tensors' bytes in order.
        advance: called with the number of bytes written since the last call.

    Raises:
        OSError: the disk is full or failed.
    """
    temporary = path.with_name(f"{path.name}.part")
    with temporary.open("wb") as file:
        file.write(make_header(shard))
        for piece in pieces:
            file.write(piece)
            advance(len(piece))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def read_pieces(stored: StoredTensor, reader: FileReader) -> Iterator[Tensor]:
    """Yield a tensor's bytes in parts of whole numbers, uint8; raises TransferError."""
    for start in range(0, stored.num_bytes, COPY_BYTES):
        raw = torch.empty(min(COPY_BYTES, stored.num_bytes - start), dtype=torch.uint8)
        reader.read(stored.file, stored.offset + start, as_memoryview(raw), what=stored.key)
        yield raw
