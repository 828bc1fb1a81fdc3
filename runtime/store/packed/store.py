"""Experts from a packed store: aligned direct reads, no byte used that is not as it was written."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from torch import Tensor

from predictors.files import expand_home, require_plain_file
from predictors.spec import ModelSpec
from runtime.config import PageCache
from runtime.errors import Fault, StoreError, TransferError
from runtime.store.base import ExpertStore, as_memoryview
from runtime.store.files import FileRange, FileReader
from runtime.store.layout import ExpertLayout
from runtime.store.model_source import fingerprint
from runtime.store.packed.manifest import (
    StoreContents,
    read_manifest,
    restore_layout,
    suggest_packing,
)

TRIES = 2
"""Reads per chunk: a checksum may fail because of the bus or a cable."""


class PackedStore(ExpertStore):
    """Reads chunks of experts from a packed store into slots. Thread-safe.

    Raises:
        StoreError: the manifest contradicts itself or the sizes of the files.
    """

    def __init__(
        self,
        folder: Path,
        contents: StoreContents,
        checksums: bytes,
        *,
        page_cache: PageCache = PageCache.BYPASS,
    ):
        self.folder = folder
        self.contents = contents
        self.experts_per_layer: Sequence[int] = [layer.num_experts for layer in contents.layers]
        try:
            self.layouts = [restore_layout(layer) for layer in contents.layers]
        except (ValueError, KeyError, OverflowError) as error:
            raise StoreError(f"{folder}: its manifest contradicts itself: {error}") from error
        self._paths = [folder / layer.file for layer in contents.layers]
        self._checksums = self._tables(checksums)
        for layer in zip(self._paths, self.layouts, self.experts_per_layer, strict=True):
            self._check_file(*layer)
        self.files = FileReader(page_cache=page_cache)

    def _tables(self, raw: bytes) -> list[np.ndarray]:
        """The checksums of each layer, uint64 `(experts, chunks)`."""
        sizes = [
            len(layout.chunks) * layer.num_experts
            for layout, layer in zip(self.layouts, self.contents.layers, strict=True)
        ]
        if len(raw) != 8 * sum(sizes):
            raise StoreError(
                f"{self.folder}: {len(raw)} bytes of checksums where {8 * sum(sizes)} belong"
            )
        parts = np.split(np.frombuffer(raw, dtype="<u8"), np.cumsum(sizes)[:-1])
        counts = self.experts_per_layer
        return [part.reshape(count, -1) for part, count in zip(parts, counts, strict=True)]

    def _check_file(self, path: Path, layout: ExpertLayout, num_experts: int) -> None:
        """Refuses a file of another size, or whose first record has more than zeros between parts.

        These are weights that the manifest denies: a record of small experts has the same size,
        whole blocks, with 8 bits as with 16.
        """
        if path.is_symlink() or not path.is_file():
            raise StoreError(f"{path} is missing or not a plain file; pack the model again")
        require_plain_file(path, StoreError)
        size, expected = path.stat().st_size, layout.num_bytes * num_experts
        if size != expected:
            raise StoreError(
                f"{path} has {size} bytes where {expected} belong; {suggest_packing(self.folder)}"
            )
        with path.open("rb") as file:
            for start, end in layout.padding_ranges:
                if any(os.pread(file.fileno(), end - start, start)):
                    raise StoreError(
                        f"{path}: bytes {start} to {end} belong to no parameter and are not "
                        "zero: it is damaged, or its manifest is of other experts; "
                        f"{suggest_packing(self.folder)}"
                    )

    scratch_bytes = 0

    @property
    def is_quantised(self) -> bool:
        return not all(layout.is_plain for layout in self.layouts)

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        """Fills the chunks' parts of `slot`, uint8 on the CPU, in one read.

        Raises:
            TransferError: short read or I/O error; or a checksum that was wrong twice.
        """
        if not chunks:
            return
        ranges = [whole for [whole] in self.layouts[layer].chunk_ranges]
        start, end = ranges[chunks[0]][0], ranges[chunks[-1]][1]
        path, record = self._paths[layer], expert * self.layouts[layer].num_bytes
        target = as_memoryview(slot[start:end])
        for _ in range(TRIES):
            self.files.read(path, record + start, target, what=f"layer {layer} expert {expert}")
            wrong = [
                (chunk, a, b)
                for chunk, (a, b) in enumerate(ranges)
                if chunk in chunks
                and xxhash.xxh3_64_intdigest(target[a - start : b - start])
                != self._checksums[layer][expert, chunk]
            ]
            if not wrong:
                return
        chunk, a, b = wrong[0]
        raise TransferError(
            f"{path}: bytes {record + a} to {record + b} "
            f"(layer {layer}, expert {expert}, chunk {chunk}) are damaged: their checksum is "
            f"not the stored one, read {TRIES} times; check the disk, then "
            f"{suggest_packing(self.folder)}",
            fault=Fault.DAMAGED,
        )

    def extents(self, layer: int, expert: int) -> list[FileRange]:
        path, layout = self._paths[layer], self.layouts[layer]
        return [
            FileRange(path, expert * layout.num_bytes + start, int(checksum))
            for [(start, _)], checksum in zip(
                layout.chunk_ranges, self._checksums[layer][expert], strict=True
            )
        ]


def open_store(
    path: str | Path,
    spec: ModelSpec | None,
    *,
    checkpoint: Path | None = None,
    page_cache: PageCache = PageCache.BYPASS,
) -> PackedStore:
    """Open a packed store of a model.

    Args:
        spec: the model that the store must match; None opens any.
        checkpoint: folder of the model, to detect a store of other weights with the same shapes.

    Raises:
        StoreError: no store, damaged, of another format version, or of another model.
    """
    folder = expand_home(path)
    contents, checksums = read_manifest(folder)
    again = "Pack this model: moecast pack model=... output=PATH"
    if spec is not None:
        packed = contents.model.spec
        spec.require(
            packed, this="this model", that=f"the store {folder}", error=StoreError, hint=again
        )
    if checkpoint is not None and fingerprint(checkpoint) != contents.fingerprint:
        raise StoreError(
            f"the store {folder} was packed from other weights than those in {checkpoint}: the "
            f"fingerprint is {fingerprint(checkpoint)[:12]}, the store has "
            f"{contents.fingerprint[:12]}. {again}"
        )
    return PackedStore(folder, contents, checksums, page_cache=page_cache)
