"""Writes a trace unit by unit; a kill at any point leaves nothing torn, lost or doubled.

The two files of a unit are written under a temporary name in the trace's folder, fsynced, renamed,
and then listed in the unit's record, a third file written in the same way. A unit without a record
does not exist: it is recorded again and its files are replaced. When all units exist, `trace.json`
lists all shards and the records are removed. Names and content depend only on the plan and each
file has one writer, so that several processes or machines write a trace without locks.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from collect.errors import TraceError
from collect.traces.checks import is_finite
from collect.traces.columns import (
    DATASET_INFO,
    STATE,
    dataset_info,
    dataset_state,
    write_stream,
)
from collect.traces.layout import TraceSignal, signal_dtype, trace_columns
from collect.traces.manifest import (
    MANIFEST,
    ShardRecord,
    TraceFile,
    TraceManifest,
    TracePlan,
    TraceRequest,
    has_manifest,
    make_manifest,
    open_writable_storage,
    read_manifest,
)
from collect.traces.reader import AGAIN, REQUESTS, Trace, check_file
from zoo.digest import HashingFile
from zoo.storage.base import FileStorage, Storage

RECORD = ".shard.json"
"""Suffix of a unit's `ShardRecord`, with which the unit exists."""


def to_half(values: NDArray, signal: TraceSignal, layer: int) -> NDArray:
    """Returns values as stored: float16, or int16 for expert ids.

    Raises:
        TraceError: a value is not finite in half precision.
    """
    if signal is TraceSignal.EXPERTS:
        return values.astype(signal_dtype(signal))
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not is_finite(half):
        # The original value: 70000 tells the user more than inf.
        wrong = values[~np.isfinite(half)].flat[0]
        raise TraceError(
            f"{signal} of layer {layer} contains {wrong}, which is not finite in half precision "
            f"(largest 65504). Omit {signal} from signals=[...], or load the model in float32 "
            "(model.dtype=float32) if its own arithmetic overflowed."
        )
    return half


class TraceWriter:
    """Begins a trace in a folder or object store, or continues the one there."""

    def __init__(self, where: str | Path | Storage, plan: TracePlan, *, joins: bool = False):
        """Creates `trace.json`, or checks that the existing trace is of this plan.

        `joins`: one of several writers, whose coordinator has checked the existing files.

        Raises:
            TraceError: the storage contains a trace of another plan, or something else.
        """
        self.storage = open_writable_storage(where)
        self.plan = plan
        self._columns = trace_columns(plan.spec, plan.signals)
        if not joins:
            self.storage.remove_temporary(everything=False)
        if not has_manifest(self.storage):
            names = [name for name in self.storage.names() if name != MANIFEST]
            if names and not has_manifest(self.storage):
                raise TraceError(
                    f"{self.storage.address} is not empty and contains no trace (it has "
                    f"{names[0]}): give another output=PATH"
                )
            # Only one of several writers succeeds.
            self.storage.create(MANIFEST, make_manifest(self.plan, []).to_bytes())
        manifest = read_manifest(self.storage)
        self._check_same(manifest)
        if not joins:
            self._check_whole(manifest)

    def missing(self) -> list[int]:
        """Returns the units that are not written yet, ascending."""
        done = committed_units(self.storage, self.plan)
        return [unit for unit in range(len(self.plan.units)) if unit not in done]

    def has(self, unit: int) -> bool:
        return self.storage.size(f"{unit_stem(self.plan, unit)}{RECORD}") is not None

    def write(
        self, unit: int, arrays: Mapping[str, NDArray], requests: Sequence[TraceRequest]
    ) -> None:
        """Writes a unit; an existing one is replaced by the same content.

        `arrays` are columns by name, with rows sorted by request and position.
        """
        assert (np.diff(arrays["request"]) >= 0).all(), "rows are in the order of their requests"
        assert set(arrays) == set(self._columns), "a unit has the plan's columns"
        stem = unit_stem(self.plan, unit)
        with self.storage.open_new(f"{stem}.arrow") as file:
            sink = HashingFile(file)
            write_stream(sink, self._columns, arrays)
        listed = REQUESTS.dump_json(list(requests), indent=1) + b"\n"
        record = ShardRecord(
            unit=unit,
            rows=len(arrays["request"]),
            data=TraceFile(name=f"{stem}.arrow", sha256=sink.hexdigest(), size=sink.size),
            requests=write_small(self.storage, f"{stem}.requests.json", listed),
        )
        self.storage.write(f"{stem}{RECORD}", record.to_bytes())

    def finish(self) -> Trace:
        """Completes the trace; all units must be written.

        Only now has it the `state.json` without which `datasets.load_from_disk` refuses a folder.
        """
        if not read_manifest(self.storage).complete:
            done = committed_units(self.storage, self.plan)
            missing = len(self.plan.units) - len(done)
            assert not missing, f"finish with {missing} units missing"
            draft = make_manifest(self.plan, [done[unit] for unit in sorted(done)])
            extra = [
                write_small(self.storage, DATASET_INFO, dataset_info(self._columns)),
                write_small(self.storage, STATE, dataset_state(draft)),
            ]
            whole = make_manifest(self.plan, draft.shards, extra=extra, complete=True)
            self.storage.write(MANIFEST, whole.to_bytes())
        self._remove_records()
        self.storage.remove_temporary(everything=True)
        return Trace.open(self.storage, verify=False)

    def _check_same(self, manifest: TraceManifest) -> None:
        # Traces of earlier versions have no samples of the routers; the rest names the model.
        there, wanted = (
            plan.model_dump(mode="json", exclude={"model": {"routers"}})
            for plan in (manifest.plan, self.plan)
        )
        self.plan.spec.require(
            manifest.plan.spec,
            this="the recording",
            that=f"the trace {self.storage.address}",
            error=TraceError,
            hint="Give another output=PATH, or delete that folder.",
        )
        wrong = [key for key in wanted if wanted[key] != there[key]]
        if wrong:
            # Units and digests follow from the rest: listed only if nothing else differs.
            shown = [key for key in wrong if key not in ("units", "prompts_digest")] or wrong
            listed = "; ".join(
                f"{key}: expected {_short(wanted[key])}, got {_short(there[key])}" for key in shown
            )
            raise TraceError(
                f"{self.storage.address} contains another trace ({listed}). "
                "Give another output=PATH, or delete that folder."
            )

    def _check_whole(self, manifest: TraceManifest) -> None:
        """Raises TraceError for a damaged file; deleted files are removed from the manifest."""
        there = set(self.storage.names())
        done = committed_units(self.storage, self.plan)
        named = [record for shard in done.values() for record in (shard.data, shard.requests)]
        for record in (*named, *manifest.extra):
            if record.name in there:
                check_file(self.storage, record)
        kept = {
            unit: shard
            for unit, shard in done.items()
            if {shard.data.name, shard.requests.name} <= there
        }
        for unit in done.keys() - kept.keys():
            self.storage.remove(f"{unit_stem(self.plan, unit)}{RECORD}")
        if len(kept) < len(done) or not {record.name for record in manifest.extra} <= there:
            self.storage.remove(STATE)
            shards = [kept[unit] for unit in sorted(kept)]
            self.storage.write(MANIFEST, make_manifest(self.plan, shards).to_bytes())
        elif manifest.complete:
            self._remove_records()

    def _remove_records(self) -> None:
        """Removes the units' records: `trace.json` lists all shards."""
        for name in self.storage.names():
            if name.endswith(RECORD):
                self.storage.remove(name)


def write_small(storage: FileStorage, name: str, data: bytes) -> TraceFile:
    storage.write(name, data)
    return TraceFile(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def unit_stem(plan: TracePlan, unit: int) -> str:
    """Returns the beginning of the names of a unit's files."""
    return f"{unit:05d}-{plan.units[unit][:12]}"


def committed_units(where: str | Path | Storage, plan: TracePlan) -> dict[int, ShardRecord]:
    """Returns the written units: those in `trace.json`, and those that have a record."""
    storage = open_writable_storage(where)
    stems = {unit_stem(plan, unit): unit for unit in range(len(plan.units))}
    units = {}
    for name in storage.names():
        unit = stems.get(name.removesuffix(RECORD))
        if unit is not None and name.endswith(RECORD):
            # Removed meanwhile by a writer that has finished the trace: `trace.json` lists it.
            with suppress(FileNotFoundError):
                units[unit] = ShardRecord.parse(
                    storage.read(name),
                    wrong=f"{storage.address}/{name} is damaged",
                    error=TraceError,
                    hint=f"delete it and {AGAIN}",
                )
    # Read last: it lists all units when records are removed.
    for shard in read_manifest(storage).shards:
        units[shard.unit] = shard
    return units


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
