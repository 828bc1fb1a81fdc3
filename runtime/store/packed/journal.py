"""The file of one layer while it is written: after an interruption, records are verified.

Records and their checksums are appended to two files, in no order that survives a power cut. A
record counts if its bytes have the checksum in the journal; the first that has not is written
again, with all after it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from torch import Tensor

from runtime.config import PageCache
from runtime.errors import TransferError
from runtime.store.base import allocate_aligned, as_memoryview
from runtime.store.files import FileReader
from runtime.store.packed.layout import PackedLayout


class LayerJournal:
    """Appends one layer's records; may be opened again after a kill at any point."""

    def __init__(self, data: Path, sums: Path, layout: PackedLayout, *, num_experts: int):
        self._layout = layout
        self._data_path, self._sums_path = data, sums
        self.num_done = self._verified(num_experts)
        self._data = self._cut(data, self.num_done * layout.num_bytes)
        self._sums = self._cut(sums, self.num_done * 8 * len(layout.chunks))

    @staticmethod
    def _cut(path: Path, size: int) -> BinaryIO:
        opened = path.open("ab", buffering=0)
        opened.truncate(size)
        return opened

    def _verified(self, num_experts: int) -> int:
        """Number of valid records."""
        if not self._sums_path.exists() or not self._data_path.exists():
            return 0
        chunks = len(self._layout.chunks)
        raw = self._sums_path.read_bytes()
        table = np.frombuffer(raw[: len(raw) // (8 * chunks) * 8 * chunks], dtype="<u8")
        reader = FileReader(page_cache=PageCache.BYPASS)
        record = allocate_aligned(self._layout.num_bytes)
        try:
            for i, row in enumerate(table.reshape(-1, chunks)[:num_experts]):
                try:
                    reader.read(
                        self._data_path, i * len(record), as_memoryview(record), what=f"expert {i}"
                    )
                except TransferError:
                    return i
                if compute_checksums(self._layout, record) != row.tolist():
                    return i
            return min(len(table) // chunks, num_experts)
        finally:
            reader.close()

    def append(self, record: Tensor) -> None:
        """Writes the next record, uint8 `(num_bytes,)`; OSError when the disk is full."""
        write_all(self._data, as_memoryview(record))
        write_all(self._sums, table_bytes(compute_checksums(self._layout, record)))

    def close(self) -> None:
        """Makes both files durable and lets the data out of the page cache."""
        for opened in (self._data, self._sums):
            os.fsync(opened.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.abandon()

    def abandon(self) -> None:
        """Closes the files as they are."""
        self._data.close()
        self._sums.close()


def table_bytes(checksums: Sequence[int]) -> bytes:
    return np.array(checksums, dtype="<u8").tobytes()


def write_all(opened: BinaryIO, data: bytes | memoryview) -> None:
    """Write all data: a nearly full disk accepts a part before it fails."""
    view = memoryview(data)
    while view:
        view = view[opened.write(view) :]


def compute_checksums(layout: PackedLayout, record: Tensor) -> list[int]:
    """xxh3_64 of each chunk, padding included."""
    view = as_memoryview(record)
    return [xxhash.xxh3_64_intdigest(view[a:b]) for [(a, b)] in layout.chunk_ranges]
