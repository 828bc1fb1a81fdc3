"""Shards as arrow streams, which `datasets` memory-maps, and columns over all shards as arrays."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from collect.errors import TraceError
from collect.traces.manifest import TraceManifest
from zoo.digest import HashingFile

DATASET_INFO = "dataset_info.json"
STATE = "state.json"

Columns = Mapping[str, tuple[np.dtype, int]]


def schema(columns: Columns) -> pa.Schema:
    """Returns the arrow schema of `layout.trace_columns`."""
    fields = []
    for name, (dtype, width) in columns.items():
        element = pa.from_numpy_dtype(dtype)
        fields.append(pa.field(name, pa.list_(element, width) if width else element))
    return pa.schema(fields)


def write_stream(
    sink: HashingFile | IO[bytes], columns: Columns, arrays: Mapping[str, NDArray]
) -> None:
    """Writes a single record batch, so that each column of a shard is a contiguous buffer."""
    fields = []
    for name, (dtype, width) in columns.items():
        flat = pa.array(np.ascontiguousarray(arrays[name], dtype=dtype).reshape(-1))
        fields.append(pa.FixedSizeListArray.from_arrays(flat, width) if width else flat)
    with pa.ipc.new_stream(sink, schema(columns)) as stream:
        stream.write_batch(pa.record_batch(fields, schema=schema(columns)))


def map_stream(path: Path, columns: Columns, *, num_rows: int) -> dict[str, NDArray]:
    """Returns views of a shard's columns without a copy.

    Raises:
        TraceError: not an arrow stream of one record batch with these columns and rows.
    """
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        # Lengths come from the file: without this check a view may lie outside of it.
        table.validate()
        if not table.schema.equals(schema(columns)) or table.num_rows != num_rows:
            raise TraceError(f"{path}: its columns or rows differ from trace.json")
        return {name: _view(table.column(name), width) for name, (_, width) in columns.items()}
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise TraceError(f"{path} is no shard of a trace: {reason}") from None


def _view(column: pa.ChunkedArray, width: int) -> NDArray:
    """Returns `[N, width]`, or `[N]` for a width of 0; raises ArrowInvalid if it is not whole."""
    if column.num_chunks != 1 or column.null_count:
        raise pa.ArrowInvalid("expected one record batch without missing values")
    array = column.chunk(0)
    flat = (array.flatten() if width else array).to_numpy(zero_copy_only=True)
    return flat.reshape(len(array), width) if width else flat


def dataset_info(columns: Columns) -> bytes:
    """Returns `dataset_info.json` for `datasets` 3 and later."""

    def value(dtype: np.dtype) -> dict:
        return {"dtype": dtype.name, "_type": "Value"}

    features = {
        name: {"feature": value(dtype), "length": width, "_type": "List"} if width else value(dtype)
        for name, (dtype, width) in columns.items()
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    return json.dumps(info, indent=1).encode() + b"\n"


def dataset_state(manifest: TraceManifest) -> bytes:
    """Returns `state.json`: the shards in order, and the digest as fingerprint."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": shard.data.name} for shard in manifest.shards],
        "_fingerprint": manifest.digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    return json.dumps(state, indent=1).encode() + b"\n"


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

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        whole = self[:]
        return np.array(whole, dtype=dtype, copy=copy) if copy else np.asarray(whole, dtype=dtype)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice) and rows.step in (None, 1):
            first, last, _ = rows.indices(len(self))
            return self._range(first, max(first, last))
        if isinstance(rows, int | np.integer):
            return self[[rows]][0]
        if isinstance(rows, slice) or np.asarray(rows).dtype == bool:
            rows = np.arange(len(self))[rows]
        return self._gather(np.asarray(rows, np.int64))

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
