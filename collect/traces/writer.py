"""Makes a trace unit by unit; killed at any point it resumes with nothing torn, lost or doubled.

A unit's two files get a temporary name in the trace's folder, are fsynced, renamed, and then named
in `trace.json`, itself replaced atomically. What `trace.json` does not name is not there: the unit
is recorded again and replaces it. Names and content depend on the plan alone, so that one process,
many processes or many machines on a shared folder write the same trace.
"""

import hashlib
import importlib.metadata
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from collect.errors import TraceError
from collect.traces.arrow import DATASET_INFO, STATE, dataset_info, dataset_state, write_stream
from collect.traces.layout import TraceSignal, column_name, columns, dtype_of
from collect.traces.manifest import (
    MANIFEST,
    FileRecord,
    Request,
    ShardRecord,
    TraceManifest,
    TracePlan,
    make_manifest,
    read_manifest,
    to_json,
)
from collect.traces.reader import REQUESTS, Trace, check_file
from predictors.files import sync_folder, write_atomic

EXPONENT = np.uint16(0x7C00)
"""Bits of a half's exponent."""

LOCK = ".lock"
LOCK_SECONDS = 60.0
"""The lock is held for the time of writing `trace.json`: milliseconds."""


class HashingFile:
    """A binary file that hashes what is written, so that nothing is read back for its digest."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._sha256 = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: Any, /) -> int:
        self._sha256.update(data)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def halved(values: NDArray, *, signal: TraceSignal, layer: int) -> NDArray:
    """As stored: float16, or int16 for expert ids.

    Raises:
        TraceError: a value that half precision does not hold, or that was not finite before.
    """
    if signal is TraceSignal.EXPERTS:
        return values.astype(dtype_of(signal))
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    # All ones in the exponent: infinity or nan. Ten times as fast as `isfinite` on halves.
    if half.size and (half.view(np.uint16) & EXPONENT).max() == EXPONENT:
        # As it was before: 70000 tells the user more than inf.
        wrong = values[~np.isfinite(half)].flat[0]
        raise TraceError(
            f"{signal} of layer {layer} holds {wrong}: not finite in half precision (largest "
            f"65504). Leave it out (signals=[...] without {signal}), or load the model in float32 "
            "(model.dtype=float32) if its own arithmetic overflowed."
        )
    return half


class TraceWriter:
    """Begins a trace in `folder`, or goes on with the one there."""

    def __init__(self, folder: str | Path, plan: TracePlan):
        """Raises TraceError when the folder holds a trace of another plan, or something else."""
        self.folder = Path(folder)
        self.plan = plan
        self._columns = columns(plan.spec, plan.signals)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._remove_orphans()
            if (self.folder / MANIFEST).exists():
                self._check_same(read_manifest(self.folder))
            else:
                self._check_empty()
                self._publish([])

    def missing(self) -> list[int]:
        """Units still to be written, ascending."""
        done = {shard.unit for shard in read_manifest(self.folder).shards}
        return [unit for unit in range(len(self.plan.units)) if unit not in done]

    def write(
        self, unit: int, arrays: Mapping[str, NDArray], requests: Sequence[Request]
    ) -> ShardRecord:
        """Adds a unit's rows; `arrays` by column name, rows of a request together and in order.

        A unit that is there already is replaced by the same content.
        """
        order = arrays["request"]
        assert (np.diff(order) >= 0).all(), "rows of a unit stand in the order of its requests"
        assert set(arrays) == set(self._columns), "a unit has the plan's columns"
        stem = f"{unit:05d}-{self.plan.units[unit][:12]}"
        data = self._write_data(f"{stem}.arrow", arrays)
        listed = REQUESTS.dump_json(list(requests), indent=1) + b"\n"
        with self._locked():
            record = ShardRecord(
                unit=unit,
                rows=len(order),
                data=data,
                requests=self._write_small(f"{stem}.requests.json", listed),
            )
            others = [one for one in read_manifest(self.folder).shards if one.unit != unit]
            self._publish(sorted([*others, record], key=lambda shard: shard.unit))
        return record

    def finish(self) -> Trace:
        """Makes the folder one that `datasets.load_from_disk` opens; every unit must be there.

        Until now it had no `state.json`, so nobody took the part for the whole.
        """
        with self._locked():
            manifest = read_manifest(self.folder)
            if not manifest.complete:
                missing = len(self.plan.units) - len(manifest.shards)
                assert not missing, f"finish with {missing} units missing"
                extra = [
                    self._write_small(DATASET_INFO, dataset_info(self._columns)),
                    self._write_small(STATE, dataset_state(manifest)),
                ]
                self._publish(manifest.shards, extra=extra, complete=True)
        return Trace.open(self.folder, verify=False)

    def _write_data(self, name: str, arrays: Mapping[str, NDArray]) -> FileRecord:
        temporary = self.folder / f".{name}.{socket.gethostname()}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                sink = HashingFile(file)
                write_stream(sink, self._columns, arrays)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.folder)
        return FileRecord(name=name, sha256=sink.hexdigest(), size=sink.size)

    def _write_small(self, name: str, data: bytes) -> FileRecord:
        """Under the lock, so that whoever holds it knows every other temporary file for dead."""
        write_atomic(self.folder / name, data)
        return FileRecord(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))

    def _publish(
        self,
        shards: Sequence[ShardRecord],
        *,
        extra: Sequence[FileRecord] = (),
        complete: bool = False,
    ) -> None:
        manifest = make_manifest(
            plan=self.plan,
            tool_version=tool_version(),
            complete=complete,
            shards=tuple(shards),
            extra=tuple(extra),
        )
        write_atomic(self.folder / MANIFEST, to_json(manifest))

    def _locked(self) -> FileLock:
        return FileLock(self.folder / LOCK, timeout=LOCK_SECONDS)

    def _check_same(self, manifest: TraceManifest) -> None:
        there, wanted = (plan.model_dump(mode="json") for plan in (manifest.plan, self.plan))
        self.plan.spec.require(
            manifest.plan.spec,
            this="what is asked for",
            that=f"the trace {self.folder}",
            error=TraceError,
            hint="Give another output=PATH, or delete that folder.",
        )
        wrong = [key for key in wanted if wanted[key] != there[key]]
        if wrong:
            # Units and digests follow from the rest: named only when nothing else differs.
            told = [key for key in wrong if key not in ("units", "prompts_digest")] or wrong
            listed = "; ".join(
                f"{key}: there {_short(there[key])}, asked {_short(wanted[key])}" for key in told
            )
            raise TraceError(
                f"{self.folder} holds another trace ({listed}). "
                "Give another output=PATH, or delete that folder."
            )
        for record in manifest.files():
            if (self.folder / record.name).exists():
                check_file(self.folder, record)
        kept = [
            shard
            for shard in manifest.shards
            if (self.folder / shard.data.name).exists()
            and (self.folder / shard.requests.name).exists()
        ]
        whole = not manifest.complete or all(
            (self.folder / record.name).exists() for record in manifest.extra
        )
        if len(kept) < len(manifest.shards) or not whole:
            (self.folder / STATE).unlink(missing_ok=True)
            self._publish(kept)

    def _check_empty(self) -> None:
        found = sorted(path.name for path in self.folder.iterdir() if path.name != LOCK)
        if found:
            raise TraceError(
                f"{self.folder} is not empty and holds no trace (it has {found[0]}): "
                "give another output=PATH"
            )

    def _remove_orphans(self) -> None:
        """What killed writers left. Shards of living writers elsewhere stay; they hold no lock."""
        host = f".{socket.gethostname()}."
        for path in self.folder.glob(".*"):
            if path.name.endswith(".tmp"):
                pid = int(path.suffixes[-2][1:])
                if host in path.name and not _alive(pid):
                    path.unlink(missing_ok=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)


def tool_version() -> str:
    """Version of this package; `source` where it runs from a checkout that is not installed."""
    try:
        return importlib.metadata.version("moecast")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def column_arrays(signal: TraceSignal, layer: int, values: NDArray) -> dict[str, NDArray]:
    """One entry of `TraceWriter.write`'s `arrays`, checked and halved."""
    return {column_name(signal, layer): halved(values, signal=signal, layer=layer)}
