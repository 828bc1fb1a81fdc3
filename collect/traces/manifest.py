"""`trace.json`: the model, the settings, and the digest of each file of a trace."""

import hashlib
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue

from collect.errors import TraceError
from collect.traces.layout import Split, TraceSignal
from predictors.files import refuse_lfs_pointer
from predictors.origin import package_version
from predictors.records import Count, ModelRecord, Sha256, StrictRecord
from predictors.spec import ModelSpec
from zoo.storage import open_storage
from zoo.storage.base import FileStorage, Storage

SCHEMA_VERSION: Final = 1
MANIFEST = "trace.json"

FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z_][0-9A-Za-z_.-]*$")]
"""A plain name, which cannot lead outside the trace's folder."""


class TraceModel(ModelRecord):
    """A `ModelSpec` as a trace records it."""

    num_layers: Annotated[int, Field(gt=0, le=2**12)]
    """Each has a column for each signal: far above any model, the number is a fault."""
    num_experts: Annotated[int, Field(gt=0, lt=2**15)]
    top_k: Annotated[int, Field(gt=0, lt=2**15)]
    hidden_size: Annotated[int, Field(ge=0, lt=2**24)]
    """0 if the routing was imported and the size is not known."""


class TraceFile(StrictRecord):
    """A file of the trace."""

    name: FileName
    sha256: Sha256
    size: Count


class TraceRequest(StrictRecord):
    """A prompt and the number of tokens generated after it."""

    index: Count
    """Number in the `request` column."""
    digest: Sha256
    """`prompt_digest` of the prompt's text."""
    dataset: str
    split: Split
    prompt_tokens: Count
    generated_tokens: Count
    """Rows of phase decode: generated tokens that went through the model."""


class ShardRecord(StrictRecord):
    """The rows of a unit."""

    unit: Count
    """Position in `TracePlan.units`."""
    rows: Count
    data: TraceFile
    requests: TraceFile
    """JSON list of `TraceRequest`."""


class TracePlan(StrictRecord):
    """Everything that a trace's content depends on; equal plans make equal traces."""

    schema_version: Literal[1] = SCHEMA_VERSION
    source: Literal["recorded", "imported"]
    model: TraceModel
    signals: tuple[TraceSignal, ...]
    dataset: str
    """Name of the source of prompts."""
    prompts_digest: Sha256
    """sha256 over the digests of all prompts in order."""
    settings: dict[str, JsonValue]
    """Seed, lengths and sampling of the generated tokens."""
    units: tuple[Sha256, ...]
    """Names of the units in order, each a digest of everything that its rows depend on."""

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec


class TraceManifest(StrictRecord):
    """The content of `trace.json`."""

    plan: TracePlan
    tool_version: str
    complete: bool
    """True when every unit is written. Only then does `datasets.load_from_disk` open the folder."""
    shards: tuple[ShardRecord, ...]
    """In the order of units."""
    extra: tuple[TraceFile, ...] = ()
    """`dataset_info.json` and `state.json`."""
    digest: Sha256
    """sha256 of everything else in this file; it names the trace and detects damage."""

    @property
    def num_tokens(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def files(self) -> list[TraceFile]:
        """Returns all files except `trace.json`."""
        named = [record for shard in self.shards for record in (shard.data, shard.requests)]
        return [*named, *self.extra]


def hash_value(value: Any) -> str:
    """Returns the sha256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def make_manifest(
    plan: TracePlan,
    shards: Iterable[ShardRecord],
    *,
    extra: Iterable[TraceFile] = (),
    complete: bool = False,
) -> TraceManifest:
    draft = TraceManifest(
        plan=plan,
        tool_version=package_version("moecast") or "source",
        complete=complete,
        shards=tuple(shards),
        extra=tuple(extra),
        digest="0" * 64,
    )
    return draft.model_copy(update={"digest": _own_digest(draft)})


def _own_digest(manifest: TraceManifest) -> str:
    return hash_value(manifest.model_dump(mode="json", exclude={"digest"}))


def has_manifest(where: str | Path | Storage) -> bool:
    """Returns True if there is a trace, finished or not."""
    try:
        with open_storage(where).stream(MANIFEST):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_manifest(where: str | Path | Storage) -> TraceManifest:
    """Returns the manifest; raises TraceError if it is missing, damaged, or no manifest."""
    storage = open_storage(where)
    path = f"{storage.address}/{MANIFEST}"
    try:
        data = storage.read(MANIFEST)
        refuse_lfs_pointer(data, path, TraceError)
    except FileNotFoundError:
        raise TraceError(
            f"{storage.address} is not a trace: it has no {MANIFEST}. "
            f"Make one: moecast collect {shlex.quote(f'output={storage.address}')}"
        ) from None
    except NotADirectoryError:
        raise TraceError(f"{storage.address} is not a trace: a trace is a folder") from None
    manifest = TraceManifest.parse(
        data,
        wrong=f"{path} is damaged or of another version of the format",
        error=TraceError,
        hint="collect the trace again into another folder",
    )
    if _own_digest(manifest) != manifest.digest:
        raise TraceError(
            f"{path} is damaged: its content does not match the digest that it carries. "
            "Collect the trace again into another folder."
        )
    return manifest


def open_writable_storage(where: str | Path | Storage) -> FileStorage:
    """Returns the storage that a trace is written to.

    Raises:
        TraceError: the storage is read-only, or has no operations on single files.
    """
    storage = open_storage(where)
    if not isinstance(storage, FileStorage):
        raise TraceError(
            f"a trace cannot be written to {storage.address}; name a folder or s3://BUCKET/PATH"
        )
    return storage
