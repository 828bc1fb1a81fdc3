"""Writes a checkpoint anew with other tensors: without its experts, or with larger ones.

Without its experts, a model and a packed store are all that serving needs.
"""

import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from predictors.files import open_atomic, replace_folder, write_json
from predictors.units import MIB
from runtime.errors import CheckpointError
from runtime.store.base import as_memoryview
from runtime.store.files import FileReader
from runtime.store.hub_snapshot import PATTERNS
from runtime.store.model_check import (
    INDEX_SUFFIX,
    SUFFIX,
    find_weights,
    is_index,
    list_weight_files,
)
from runtime.store.model_source import (
    DIGESTS,
    WITHOUT_EXPERTS,
    describe_without_experts,
    fingerprint,
    has_no_experts,
)
from runtime.store.tensor_index import SizedTensor, StoredTensor, make_header, read_tensor_index

COPY_BYTES = 16 * MIB
"""Bytes read at a time."""
SLACK_BYTES = 64 * MIB
"""Room for headers, configuration and tokenizer."""
NOT_COPIED = (SUFFIX, INDEX_SUFFIX, DIGESTS, "audit.json")
"""Ends of names of files that are of the whole checkpoint's weights."""


@dataclass(frozen=True)
class RewrittenTensor:
    """A tensor of the new checkpoint."""

    source: StoredTensor
    """The tensor that it is made of, whose file's name its own file has."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    change: Callable[[Tensor], Tensor] | None = None
    """Makes it of the source; None: it has the same bytes."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, files: FileReader) -> Iterator[memoryview]:
        """Yield its bytes; raises TransferError."""
        if self.change is not None:
            yield as_memoryview(self.change(self.source.load(files)))
            return
        for start in range(0, self.num_bytes, COPY_BYTES):
            raw = torch.empty(min(COPY_BYTES, self.num_bytes - start), dtype=torch.uint8)
            view = as_memoryview(raw)
            files.read(self.source.file, self.source.offset + start, view, what=self.source.key)
            yield view


def rewrite_checkpoint(
    source: Path,
    output: Path,
    tensors: Mapping[str, RewrittenTensor],
    describe: Callable[[Path], Mapping[str, Any]],
    *,
    option: str,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a checkpoint of these tensors to a new folder, atomically.

    Args:
        source: the checkpoint that other files, such as the tokenizer's, are copied from.
        describe: returns other JSON files, given the folder with the written weights.
        option: the option that names the output, for messages.
        advance: called with the number of bytes written since the last call.

    Raises:
        CheckpointError: the disk has no room.
        TransferError: the checkpoint cannot be read.
        OSError: the disk is full or failed.
    """
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output.parent).free
    if free < num_bytes + SLACK_BYTES:
        raise CheckpointError(
            f"no room for {output}: {num_bytes + SLACK_BYTES} bytes are needed and {free} are "
            f"free; choose another {option}=PATH, or make room"
        )
    shards: dict[str, dict[str, RewrittenTensor]] = {}
    for key, tensor in tensors.items():
        shards.setdefault(tensor.source.file.name, {})[key] = tensor
    with replace_folder(output) as partial, FileReader() as files:
        for name, shard in shards.items():
            pieces = (piece for tensor in shard.values() for piece in tensor.read(files))
            write_tensors(partial / name, shard, pieces, advance)
        for file in {file for pattern in PATTERNS for file in source.glob(pattern)}:
            if not file.name.endswith(NOT_COPIED):
                shutil.copyfile(file, partial / file.name)
        index = find_weights(source)
        if is_index(index):
            listed = {key: name for name, shard in shards.items() for key in shard}
            content = {"metadata": {"total_size": num_bytes}, "weight_map": listed}
            write_json(partial / index.name, content)
        for name, described in describe(partial).items():
            write_json(partial / name, described)


def write_tensors(
    path: Path,
    shard: Mapping[str, SizedTensor],
    pieces: Iterable[memoryview],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a safetensors file of these tensors, whose bytes `pieces` are in order."""
    with open_atomic(path) as file:
        file.write(make_header(shard))
        for piece in pieces:
            file.write(piece)
            advance(len(piece))


def write_without_experts(
    source: Path, output: Path, *, dropped: Collection[str], origin: Mapping[str, str]
) -> None:
    """Copy a checkpoint without its experts' tensors, or find the copy there.

    Args:
        dropped: names of the tensors that only experts are made of, or no part of the model.
        origin: `identity` of the whole checkpoint.

    Raises:
        CheckpointError: something else is at `output`, or the disk has no room.
        TransferError: the checkpoint cannot be read.
    """
    whole = fingerprint(source)
    if output.exists():
        if not has_no_experts(output) or fingerprint(output) != whole:
            raise CheckpointError(
                f"{output} exists and is not this model without its experts; choose another "
                "dense_output=PATH"
            )
        return
    kept = {
        key: RewrittenTensor(stored, stored.shape, stored.dtype)
        for key, stored in read_tensor_index(list_weight_files(source)).items()
        if key not in dropped
    }
    rewrite_checkpoint(
        source,
        output,
        kept,
        lambda folder: {
            WITHOUT_EXPERTS: describe_without_experts(folder, fingerprint=whole, origin=origin)
        },
        option="dense_output",
    )
