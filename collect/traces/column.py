"""A column over all shards, indexed by row number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Column:
    """Read-only `[N, width]` or `[N]` over memory-mapped chunks, one per shard.

    A range of rows inside a shard is a view; a range across shards, and any list or mask of rows,
    is gathered into a new array. `np.asarray(column)` returns all rows.
    """

    def __init__(self, chunks: Sequence[NDArray]):
        assert chunks, "a column has at least one shard"
        self.chunks = tuple(chunks)
        self._starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self.dtype = chunks[0].dtype
        self.shape: tuple[int, ...] = (int(self._starts[-1]), *chunks[0].shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        whole = self[:]
        return np.array(whole, dtype=dtype, copy=copy) if copy else np.asarray(whole, dtype=dtype)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            first, last, stride = rows.indices(len(self))
            if stride == 1:
                return self._range(first, max(first, last))
            return self._gather(np.arange(first, last, stride))
        if isinstance(rows, int | np.integer):
            row = int(rows) + (len(self) if rows < 0 else 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {rows} of {len(self)}")
            shard = int(np.searchsorted(self._starts, row, side="right")) - 1
            return self.chunks[shard][row - self._starts[shard]]
        wanted = np.asarray(rows)
        if wanted.dtype == bool:
            if wanted.shape != (len(self),):
                raise IndexError(f"mask of {wanted.shape} over {len(self)} rows")
            wanted = np.flatnonzero(wanted)
        return self._gather(wanted.astype(np.int64))

    def _range(self, first: int, last: int) -> NDArray:
        parts = [
            chunk[max(0, first - start) : last - start]
            for chunk, start in zip(self.chunks, self._starts[:-1], strict=True)
            if first < start + len(chunk) and start < last
        ]
        if not parts:
            return self.chunks[0][:0]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _gather(self, rows_N: NDArray[np.int64]) -> NDArray:
        if len(self.chunks) == 1:
            return self.chunks[0].take(rows_N, axis=0)
        if len(rows_N) and not -len(self) <= rows_N.min() <= rows_N.max() < len(self):
            raise IndexError(f"rows {rows_N.min()}..{rows_N.max()} of {len(self)}")
        rows_N = np.where(rows_N < 0, rows_N + len(self), rows_N)
        shard_N = np.searchsorted(self._starts, rows_N, side="right") - 1
        gathered = np.empty((*rows_N.shape, *self.shape[1:]), self.dtype)
        for shard in np.unique(shard_N).tolist():
            in_shard = shard_N == shard
            gathered[in_shard] = self.chunks[shard].take(
                rows_N[in_shard] - self._starts[shard], axis=0
            )
        return gathered
