"""`manifest.json`: an entry and the digest of each file."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue, field_validator

from predictors.base import Signal
from predictors.records import ModelRecord, Sha256, StrictRecord
from predictors.spec import ModelSpec
from zoo.digest import check_path, hash_bytes
from zoo.errors import DamagedError, ZooError

FORMAT_VERSION: Final = 1
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*/[a-z0-9][a-z0-9._-]*")
MAX_NAME = 200
EntryName = Annotated[str, Field(pattern=f"^{NAME.pattern}$", max_length=MAX_NAME)]
Created = Annotated[str, Field(max_length=64)]
"""UTC, ISO 8601."""
SUFFIXES = (".onnx", ".safetensors", ".json", ".md", ".png")
"""Formats that an entry may contain: their parsers run no code. Pickle is none of them."""

MAX_MANIFEST_BYTES = 4 << 20
MAX_ONNX_BYTES = 64 << 20
"""A predictor's graph takes a few MB."""
MAX_FILE_BYTES = 2 << 30
MAX_ENTRY_BYTES = 4 << 30
MAX_FILES = 10_000
"""Files of an entry: one for each pair of layers."""

Scalar = float | int | str | bool | None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def name_entry(model: str, predictor: str) -> str:
    """Returns the name of an entry, such as `qwen3-30b-a3b/residual` for `Qwen3-30B-A3B`."""
    stem = re.sub(r"[^a-z0-9._-]+", "-", model.lower()).lstrip("._-")
    return f"{stem[: MAX_NAME - 1 - len(predictor)] or 'model'}/{predictor}"


class GraphRecord(StrictRecord):
    """Inputs and outputs of an ONNX graph: names to shapes, a dynamic dimension by its name."""

    inputs: dict[str, list[int | str]]
    outputs: dict[str, list[int | str]]


class FileRecord(StrictRecord):
    sha256: Sha256
    size: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
    graph: GraphRecord | None = None
    """None unless it is an ONNX file."""


class EntryManifest(StrictRecord):
    """The content of `manifest.json`; its sha256 is the entry's digest and so names every byte."""

    format_version: Literal[1]
    name: EntryName
    """MODEL/PREDICTOR, for example `qwen2-moe-tiny/stride`."""
    kind: str
    """A kind of `predictors.registry`."""
    options: dict[str, JsonValue]
    """Arguments of the predictor's `from_files`."""
    model: ModelRecord
    signals: list[Signal]
    """Signals that the predictor needs."""
    licence: str
    """SPDX identifier."""
    trace_digest: Sha256 | None
    """Digest of the training trace; None if no trace was needed."""
    metrics: dict[str, Scalar]
    """Means over held-out requests, None if not measured; `metrics.json` has every layer."""
    parity: dict[str, Scalar]
    """Export against torch: number of tokens, share with the same top-k set, largest difference."""
    code_version: str
    created: Created
    files: dict[str, FileRecord]

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for path, record in files.items():
            check_path(path)
            if PurePosixPath(path).suffix not in SUFFIXES:
                raise ValueError(f"{path!r}: an entry has only {', '.join(SUFFIXES)} files")
            if path.endswith(".onnx") and record.size > MAX_ONNX_BYTES:
                raise ValueError(f"{path!r}: {record.size:,} bytes, over {MAX_ONNX_BYTES:,}")
        total = sum(record.size for record in files.values())
        if total > MAX_ENTRY_BYTES or len(files) > MAX_FILES:
            raise ValueError(
                f"{len(files):,} files of {total:,} bytes; an entry has {MAX_FILES:,} files of "
                f"{MAX_ENTRY_BYTES:,} bytes at most"
            )
        return files

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(record.size for record in self.files.values())

    @property
    def digest(self) -> str:
        return hash_bytes(self.to_bytes())


def parse_manifest(data: bytes, *, what: str) -> EntryManifest:
    """Parses a manifest, whose digest was checked before.

    Raises ZooError, which names the wrong field; DamagedError if these bytes are not the canonical
    form, so that the entry's digest would be that of other bytes.
    """
    manifest = EntryManifest.parse(data, wrong=f"{what} is not a manifest", error=ZooError)
    if manifest.to_bytes() != data:
        raise DamagedError(
            f"{what} is not in canonical form: its spacing, its order or its numbers differ from "
            "those that moecast writes. Its publisher must write it with moecast"
        )
    return manifest
