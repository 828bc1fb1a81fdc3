"""Shards as arrow streams, which `datasets` memory-maps, and numpy views of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from collect.errors import TraceError
from collect.traces.manifest import TraceManifest

DATASET_INFO = "dataset_info.json"
STATE = "state.json"

Columns = Mapping[str, tuple[np.dtype, int]]


class Sink(Protocol):
    """A binary file that arrow writes to."""

    closed: bool

    def write(self, data: Any, /) -> int: ...

    def flush(self) -> None: ...


def schema(columns: Columns) -> pa.Schema:
    """Returns the arrow schema of `layout.trace_columns`."""
    fields = []
    for name, (dtype, width) in columns.items():
        element = pa.from_numpy_dtype(dtype)
        fields.append(pa.field(name, pa.list_(element, width) if width else element))
    return pa.schema(fields)


def write_stream(sink: Sink, columns: Columns, arrays: Mapping[str, NDArray]) -> None:
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
