"""Opens a trace: the digest of each file is verified before parsing, columns are memory-mapped.

Shape suffixes: N rows, T tokens of a step, D hidden size, E experts, K top_k.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from collect.errors import TraceError
from collect.traces.checks import check_manifest, check_requests, check_signals, check_tokens
from collect.traces.columns import Column, map_stream
from collect.traces.layout import Split, TraceSignal, column_name, trace_columns
from collect.traces.manifest import (
    MANIFEST,
    TraceFile,
    TraceManifest,
    TraceRequest,
    read_manifest,
)
from predictors.base import Floats, Ints
from predictors.errors import unknown
from predictors.files import CACHE, LFS_POINTER, cache_folder, refuse_lfs_pointer
from predictors.records import explain_validation_error
from predictors.spec import ModelSpec
from zoo.storage import open_storage
from zoo.storage.base import FileStorage, Storage
from zoo.storage.folder import FolderStorage

REQUESTS = TypeAdapter(list[TraceRequest])

AGAIN = "run the same `moecast collect` again: it records what is missing"


def check_file(storage: FileStorage, record: TraceFile, *, verify: bool = True) -> None:
    """Raises TraceError if the file differs from its record."""
    path, size = f"{storage.address}/{record.name}", storage.size(record.name)
    if size is None:
        raise TraceError(f"{path} is missing: {AGAIN}")
    if size != record.size:
        refuse_lfs_pointer(storage.read(record.name, limit=len(LFS_POINTER)), path, TraceError)
        expected, got = (f"{count:,} bytes" for count in (record.size, size))
    elif verify and (digest := storage.sha256(record.name)) != record.sha256:
        expected, got = (f"sha256 {one[:12]}..." for one in (record.sha256, digest))
    else:
        return
    raise TraceError(
        f"{path} is damaged: expected {expected}, got {got}. "
        f"Nothing of it was read. Delete it and {AGAIN}"
    )


def read_requests(path: Path) -> list[TraceRequest]:
    """Returns the requests of a shard; raises TraceError if the file is no list of them."""
    try:
        return REQUESTS.validate_json(path.read_bytes())
    except ValidationError as error:
        raise TraceError(
            f"{path} is no list of requests: {explain_validation_error(error)}"
        ) from None


@dataclass(frozen=True)
class TraceStep:
    """Rows of a trace as one forward pass; a value is read when it is used.

    `Trace.steps` makes steps of one request: its prompt (T tokens), or a generated token (T = 1).
    Any other T rows may be treated as one step too.
    """

    trace: "Trace"
    rows: Any
    """A slice, for rows of one request, or an array of any rows."""
    columns: Callable[[TraceSignal, int], NDArray] | None = None
    """Columns of the request from `first` on: looked up once and not for each token."""
    first: int = 0

    @property
    def tokens_T(self) -> Ints:
        return self.trace.tokens[self.rows].astype(np.int64)

    @property
    def requests_T(self) -> Ints:
        return self.trace.requests[self.rows].astype(np.int64)

    @property
    def phases_T(self) -> Ints:
        return self.trace.phases[self.rows].astype(np.int64)

    @property
    def num_tokens(self) -> int:
        return len(self.trace.phases[self.rows])

    def layer_input(self, layer: int) -> Floats:
        """Returns `[T, D]`: the normalised hidden states that enter the layer."""
        return self._read(TraceSignal.LAYER_INPUT, layer).astype(np.float32)

    def gate_input(self, layer: int) -> Floats:
        """Returns `[T, D]`: the router's input."""
        return self._read(TraceSignal.GATE_INPUT, layer).astype(np.float32)

    def logits(self, layer: int) -> Floats:
        """Returns `[T, E]`: the router's output over all experts."""
        return self._read(TraceSignal.GATE_LOGITS, layer).astype(np.float32)

    def experts(self, layer: int) -> Ints:
        """Returns `[T, K]`: the chosen experts, in the router's order."""
        return self._read(TraceSignal.EXPERTS, layer).astype(np.int64)

    def weights(self, layer: int) -> Floats:
        """Returns `[T, K]`: the router's weights of the chosen experts."""
        return self._read(TraceSignal.WEIGHTS, layer).astype(np.float32)

    def _read(self, signal: TraceSignal, layer: int) -> NDArray:
        if self.columns is None:
            return self.trace.column(signal, layer)[self.rows]
        rows = slice(self.rows.start - self.first, self.rows.stop - self.first)
        return self.columns(signal, layer)[rows]


def per_token(name: str) -> "cached_property[NDArray]":
    """Returns a property of `Trace`, a per-token column, which is read when it is first used."""
    return cached_property(lambda trace: trace._column(name)[:])


@dataclass(eq=False, repr=False)
class Trace:
    """A finished trace with rows 0..num_tokens-1; those of a request are contiguous.

    Opening maps the shards; a value is read from disk when it is used.
    """

    path: Path
    """Folder on this machine."""
    where: str
    """Folder or address that the user gave."""
    manifest: TraceManifest
    request_table: list[TraceRequest]
    """Indexed by `TraceRequest.index`."""
    _shards: list[dict[str, NDArray]]
    _columns: dict[str, Column] = field(default_factory=dict)

    @classmethod
    def open(cls, where: str | Path | Storage, *, verify: bool = True) -> "Trace":
        """Opens a finished trace; a trace in an object store is first copied to this machine.

        Args:
            where: folder, address or storage.
            verify: False compares sizes only, for a trace that this process has just written, or
                that another process of this run has verified.

        Raises:
            TraceError: no trace, incomplete, damaged, or with impossible ids, numbers, order or
                counts.
        """
        storage = open_storage(where)
        manifest = read_manifest(storage)
        plan = manifest.plan
        check_manifest(manifest, f"{storage.address}/{MANIFEST}")
        if not manifest.complete:
            names = storage.names() if isinstance(storage, FileStorage) else []
            records = {name for name in names if name.endswith(".shard.json")}
            have = len(manifest.shards) + len(records)
            raise TraceError(
                f"{storage.address} is not finished: {have} of {len(plan.units)} parts. "
                "Run the same `moecast collect` again: it records what is missing."
            )
        if isinstance(storage, FolderStorage):
            folder = storage.folder
            for record in manifest.files():
                check_file(storage, record, verify=verify)
        else:
            folder = copy_trace(storage, manifest)
        wanted = trace_columns(plan.spec, plan.signals)
        shards, requests, first_row = [], [], 0
        for shard in manifest.shards:
            path = folder / shard.data.name
            arrays = map_stream(path, wanted, num_rows=shard.rows)
            listed = read_requests(folder / shard.requests.name)
            if verify:
                check_tokens(arrays, listed, str(path), first_row=first_row)
                check_signals(arrays, plan, str(path), first_row=first_row)
            first_row += shard.rows
            requests += listed
            shards.append(arrays)
        requests.sort(key=lambda request: request.index)
        check_requests(requests, str(folder))
        return cls(folder, storage.address, manifest, requests, shards)

    @cached_property
    def spec(self) -> ModelSpec:
        return self.manifest.plan.spec

    @property
    def digest(self) -> str:
        """The sha256 (hex) of the manifest, which includes the digest of each file."""
        return self.manifest.digest

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def signals(self) -> tuple[TraceSignal, ...]:
        return self.manifest.plan.signals

    def column(self, signal: str, layer: int) -> Column:
        """Returns `[N, width]` of a signal of a layer: float16, or int16 for `experts`.

        Raises:
            TraceError: the trace does not contain this signal or layer.
        """
        if signal not in self.signals:
            raise TraceError(
                f"{self.path}: {unknown('signal', signal, map(str, self.signals))} "
                "(choose the recorded signals with signals=[...])"
            )
        if not 0 <= layer < self.spec.num_layers:
            raise TraceError(f"{self.path} has layers 0..{self.spec.num_layers - 1}, got {layer}")
        return self._column(column_name(TraceSignal(signal), layer))

    def _request_column(self, first: int, last: int, signal: TraceSignal, layer: int) -> NDArray:
        return self.column(signal, layer)[first:last]

    def _column(self, name: str) -> Column:
        if name not in self._columns:
            self._columns[name] = Column([shard[name] for shard in self._shards])
        return self._columns[name]

    tokens = per_token("token")
    """Token ids, `[N]` int32; -1 where they are not known."""
    positions = per_token("position")
    """Position in the request, `[N]` int32; prompt and generated tokens are counted together."""
    requests = per_token("request")
    """Index into `request_table`, `[N]` int32."""
    phases = per_token("phase")
    """Values of `Phase`, `[N]` int8."""

    @cached_property
    def has_tokens(self) -> bool:
        """Whether token ids are known: an imported log or a server's recording may have none."""
        return bool((self.tokens >= 0).any())

    def rows(self, split: str | None) -> NDArray[np.int64]:
        """Returns the rows of a split, ascending; None: all rows."""
        if split is None:
            return np.arange(self.num_tokens)
        side = Split(split)
        belongs = np.array([request.split is side for request in self.request_table], dtype=bool)
        return np.flatnonzero(belongs[self.requests])

    def steps(self, split: str | None = None) -> Iterator[TraceStep]:
        """Yields the forward passes of each request in order: its prompt, then each token.

        `split` None means all requests.
        """
        starts = np.searchsorted(self.requests, np.arange(len(self.request_table) + 1))
        for request in self.request_table:
            if split is not None and request.split is not Split(split):
                continue
            first, last = (int(row) for row in starts[request.index : request.index + 2])
            columns = cache(partial(self._request_column, first, last))
            decode = first + request.prompt_tokens
            if request.prompt_tokens:
                yield TraceStep(self, slice(first, decode), columns, first)
            for row in range(decode, last):
                yield TraceStep(self, slice(row, row + 1), columns, first)


def copy_trace(source: Storage, manifest: TraceManifest) -> Path:
    """Copies the files of a trace that is not in a folder; returns the copy's folder.

    The folder is named by the trace's digest, and each file is hashed while it arrives: one that
    was altered in the storage or on the way is refused. Files that are there already are kept.

    Raises:
        TraceError: a file is missing in the storage, or differs from its record in `trace.json`.
        UnreachableError, DiskFullError: as `FolderStorage.fetch`.
    """
    copy = FolderStorage(cache_folder("traces") / manifest.digest[:32])
    copy.folder.mkdir(parents=True, exist_ok=True)
    copy.remove_temporary(everything=False)
    missing = [
        record for record in manifest.files() if not copy.has_bytes(record.name, record.sha256)
    ]
    copy.require_space(
        sum(record.size for record in missing),
        f"a copy of {source.address}",
        advice=f"Set {CACHE} to a folder on a larger disk",
    )
    for record in missing:
        name, sha256, size = record.name, record.sha256, record.size
        copy.fetch(source, name, sha256, size, what=name, error=TraceError)
    copy.write(MANIFEST, manifest.to_bytes())
    return copy.folder
