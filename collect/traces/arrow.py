"""Shards as arrow streams, which `datasets` memory-maps, and numpy views of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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


def map_stream(path: Path, columns: Columns) -> dict[str, NDArray] | None:
    """Returns views of a shard's columns without a copy; None if the schema differs."""
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    if not table.schema.equals(schema(columns)):
        return None
    arrays = {}
    for name, (_, width) in columns.items():
        array = table.column(name).chunk(0)
        flat = (array.flatten() if width else array).to_numpy(zero_copy_only=True)
        arrays[name] = flat.reshape(-1, width) if width else flat
    return arrays


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
