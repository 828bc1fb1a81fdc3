"""A trace that grows while it may be read: finished after each addition.

An addition is a new shard. Its two files are written first, under temporary names that are fsynced
and renamed, and then `trace.json` is replaced by one that lists them too. A kill at any point
leaves the trace as it was before or after the addition. Files of a shard never change, so that a
reader of an earlier `trace.json` still finds all of its shards.
"""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from collect.errors import TraceError
from collect.traces.layout import TOKEN_DTYPES, TraceSignal, choose_split, trace_columns
from collect.traces.manifest import (
    MANIFEST,
    TraceManifest,
    TraceModel,
    TracePlan,
    TraceRequest,
    has_manifest,
    hash_value,
    make_manifest,
    read_manifest,
    to_json,
)
from collect.traces.reader import check_file, read_requests
from collect.traces.writer import write_shard
from predictors.metrics import Phase
from predictors.origin import package_version
from predictors.spec import ModelSpec
from zoo.storage import FolderStorage

SERVED_VERSION = 1
"""Part of the plan: increased when the same request gives other rows."""
DATASET = "served"
LOCK = ".lock"
SHARD_FILE = re.compile(r"\d{5}-[0-9a-f]{12}\.(arrow|requests\.json)")
NO_TOKEN = -1
"""Stands for a token whose id is not recorded."""


@dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """The rows of a request: the end of its prompt, then the beginning of its answer."""

    digest: str
    """Names the prompt and chooses the split."""
    first_position: int
    prompt_tokens: int
    """Rows of the prompt; all further rows are of the answer."""
    columns: Mapping[str, NDArray]
    """The columns of `trace_columns` that are not per token, as they are stored."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))


class GrowingTrace:
    """Opens the trace in a folder, or begins one there with the first request.

    If the folder is moved away, the next addition begins a new trace in its place.

    Raises:
        TraceError: the folder has something else, a trace of another model or a damaged one, or
            another process is adding to it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, spec: ModelSpec):
        self._storage = FolderStorage(folder)
        self._spec = spec
        self._open()

    @property
    def folder(self) -> Path:
        return self._storage.folder

    @property
    def num_bytes(self) -> int:
        """Size of the shards."""
        if self._manifest is None:
            return 0
        return sum(record.size for record in self._manifest.files())

    def is_moved(self) -> bool:
        """Returns whether another folder, or none, is now where the trace was."""
        with suppress(FileNotFoundError):
            return self.folder.stat().st_ino != self._inode
        return True

    def reopen(self) -> None:
        """Opens what is there now, after the folder was moved away; raises as the class does."""
        self._lock.release(force=True)
        self._open()

    def _open(self) -> None:
        # Closed to other users: with the model, texts can be guessed from states.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._inode = self.folder.stat().st_ino
        self._lock = FileLock(self.folder / LOCK, blocking=False, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise TraceError(
                f"record={self.folder}: another server records into this folder; name another one"
            ) from None
        self._manifest: TraceManifest | None = None
        self._num_requests = 0
        names = self._storage.names()
        if has_manifest(self._storage):
            self._manifest = self._read_existing()
            last = self._manifest.shards[-1]
            self._num_requests = read_requests(self.folder / last.requests.name)[-1].index + 1
        elif others := [name for name in names if not SHARD_FILE.fullmatch(name)]:
            raise TraceError(
                f"record={self.folder} is not empty and contains no trace (it has "
                f"{others[0]}): name another folder"
            )
        listed = {record.name for record in self._manifest.files()} if self._manifest else set()
        for name in names:
            # Written by a process that ended before it could list them.
            if SHARD_FILE.fullmatch(name) and name not in listed:
                self._storage.remove(name)
        self._storage.remove_temporary(everything=False)

    def _read_existing(self) -> TraceManifest:
        manifest = read_manifest(self._storage)
        if manifest.plan.source != "served" or not manifest.shards:
            raise TraceError(
                f"record={self.folder} contains a trace that no server recorded: name "
                "another folder"
            )
        manifest.plan.spec.require(
            self._spec,
            this=f"the trace {self.folder}",
            that="the served model",
            error=TraceError,
            hint="Name another folder with record=PATH.",
        )
        for record in manifest.files():
            check_file(self._storage, record, verify=False)
        return manifest

    def add(self, requests: Sequence[ServedRequest]) -> None:
        """Adds requests, all of them or, where it fails, none.

        Raises:
            TraceError: their signals differ from those of the trace, or are too few to train on.
            OSError: they could not be written.
        """
        if self.is_moved():
            self.reopen()
        signals = find_signals(requests[0].columns, self._spec)
        if self._manifest is not None and signals != self._manifest.plan.signals:
            raise TraceError(
                f"record={self.folder} has the signals "
                f"{', '.join(self._manifest.plan.signals)}, this model gives {', '.join(signals)}: "
                "name another folder"
            )
        columns = trace_columns(self._spec, signals)
        for request in requests:
            check_columns(request, set(columns) - set(TOKEN_DTYPES))
        listed = [self._describe(number, request) for number, request in enumerate(requests)]
        plan = self._extend_plan(signals, listed)
        shard = write_shard(
            self._storage, plan, len(plan.units) - 1, columns, self._join(requests), listed
        )
        shards = (*self._manifest.shards, shard) if self._manifest else (shard,)
        manifest = make_manifest(
            plan=plan,
            tool_version=package_version("moecast") or "source",
            complete=True,
            shards=shards,
        )
        self._storage.write(MANIFEST, to_json(manifest))
        self._manifest = manifest
        self._num_requests += len(requests)

    def _describe(self, number: int, request: ServedRequest) -> TraceRequest:
        return TraceRequest(
            index=self._num_requests + number,
            digest=request.digest,
            dataset=DATASET,
            split=choose_split(request.digest),
            prompt_tokens=request.prompt_tokens,
            generated_tokens=request.num_rows - request.prompt_tokens,
        )

    def _extend_plan(
        self, signals: tuple[TraceSignal, ...], requests: Sequence[TraceRequest]
    ) -> TracePlan:
        """Returns the plan with one more unit; its digest of prompts includes the one before."""
        model = TraceModel.from_spec(self._spec)
        before = None if self._manifest is None else self._manifest.plan
        settings: dict[str, Any] = {"served_version": SERVED_VERSION}
        listed = [[request.index, request.digest, request.prompt_tokens, request.generated_tokens]
                  for request in requests]  # fmt: skip
        unit = hash_value([settings, model.model_dump(mode="json"), list(signals), listed])
        digests = [request.digest for request in requests]
        return TracePlan(
            source="served",
            model=model,
            signals=signals,
            dataset=DATASET,
            prompts_digest=hash_value([before.prompts_digest if before else None, *digests]),
            settings=settings,
            units=(*(before.units if before else ()), unit),
        )

    def _join(self, requests: Sequence[ServedRequest]) -> dict[str, NDArray]:
        """Returns the shard's columns."""
        numbers = np.arange(self._num_requests, self._num_requests + len(requests))
        lengths = [request.num_rows for request in requests]
        firsts = [request.first_position for request in requests]
        parts = [
            (request.prompt_tokens, request.num_rows - request.prompt_tokens)
            for request in requests
        ]
        arrays = {
            "request": np.repeat(numbers, lengths),
            "position": np.concatenate(
                [first + np.arange(count) for first, count in zip(firsts, lengths, strict=True)]
            ),
            "token": np.full(sum(lengths), NO_TOKEN),
            "phase": np.repeat(np.tile([Phase.PREFILL, Phase.DECODE], len(parts)), np.ravel(parts)),
        }
        for name in requests[0].columns:
            arrays[name] = np.concatenate([request.columns[name] for request in requests])
            # Lets the thread that computes the model run: one join alone may hold it up.
            time.sleep(0)
        return arrays

    def close(self) -> None:
        """Lets another process add to the trace."""
        self._lock.release(force=True)


def find_signals(columns: Collection[str], spec: ModelSpec) -> tuple[TraceSignal, ...]:
    """Returns the signals that all layers have.

    Raises:
        TraceError: a layer lacks those without which no predictor can be trained.
    """
    signals = tuple(
        signal
        for signal in TraceSignal
        if set(trace_columns(spec, [signal])) - set(TOKEN_DTYPES) <= set(columns)
    )
    missing = {TraceSignal.GATE_INPUT, TraceSignal.EXPERTS} - set(signals)
    if missing:
        raise TraceError(
            f"not every layer of {spec.model_id} gave {', '.join(sorted(missing))}, which a trace "
            "needs"
        )
    return signals


def check_columns(request: ServedRequest, names: Collection[str]) -> None:
    """Raises TraceError if columns differ from those of the requests before."""
    if set(request.columns) != set(names):
        wrong = ", ".join(sorted(set(request.columns) ^ set(names))[:3])
        raise TraceError(f"requests have different signals ({wrong}, ...)")
