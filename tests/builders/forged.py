"""Traces that were altered by someone who made the digests anew."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collect.traces.columns import map_stream, write_stream
from collect.traces.layout import trace_columns
from collect.traces.manifest import MANIFEST, make_manifest, read_manifest
from collect.traces.reader import REQUESTS
from predictors.records import StrictRecord

Change = Callable[[dict[str, NDArray], list[Any]], None]
"""Alters a shard's columns and requests in place."""


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replaces a file of a trace and makes the manifest's digests anew."""
    (folder / name).write_bytes(data)
    known = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}

    def renew(record: StrictRecord) -> StrictRecord:
        if getattr(record, "name", None) == name:
            return record.model_copy(update=known)
        return record

    manifest = read_manifest(folder)
    shards = [
        shard.model_copy(update={"data": renew(shard.data), "requests": renew(shard.requests)})
        for shard in manifest.shards
    ]
    change_manifest(folder, shards=shards, extra=[renew(record) for record in manifest.extra])


def change_manifest(folder: Path, **changed: Any) -> None:
    """Replaces fields of the manifest and makes its digest anew."""
    manifest = read_manifest(folder)
    fields = {name: getattr(manifest, name) for name in type(manifest).model_fields} | changed
    for made_anew in ("digest", "tool_version"):
        del fields[made_anew]
    (folder / MANIFEST).write_bytes(make_manifest(**fields).to_bytes())


def forge_shard(folder: Path, change: Change, *, shard: int = 0) -> None:
    """Alters a shard as `change` says, and makes all digests anew."""
    manifest = read_manifest(folder)
    record = manifest.shards[shard]
    columns = trace_columns(manifest.plan.spec, manifest.plan.signals)
    mapped = map_stream(folder / record.data.name, columns, num_rows=record.rows)
    arrays = {name: np.array(values) for name, values in mapped.items()}
    requests = REQUESTS.validate_json((folder / record.requests.name).read_bytes())
    change(arrays, requests)
    # A new file: the old one is mapped.
    (folder / record.data.name).unlink()
    with (folder / record.data.name).open("wb") as file:
        write_stream(file, columns, arrays)
    replace_file(folder, record.data.name, (folder / record.data.name).read_bytes())
    replace_file(folder, record.requests.name, REQUESTS.dump_json(requests))
