"""`manifest.json`: what an entry is, what it was made for, and the digest of each of its files."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from predictors.base import Signal
from predictors.spec import ModelSpec
from zoo.digest import check_path, digest_of
from zoo.errors import ZooError

FORMAT_VERSION: Final = 1
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*/[a-z0-9][a-z0-9._-]*")
SUFFIXES = (".onnx", ".safetensors", ".json", ".md")
"""What an entry may hold: formats whose parsers run no code. No pickle under any name."""

MAX_MANIFEST_BYTES = 4 << 20
MAX_ONNX_BYTES = 64 << 20
"""A predictor's graph is a few MB; far above it something else is meant."""
MAX_FILE_BYTES = 2 << 30

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Scalar = float | int | str | bool | None


class Strict(BaseModel):
    """An unknown key is an error, everywhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GraphRecord(Strict):
    """What an ONNX graph takes and gives: names to shapes, a free dimension by its name."""

    inputs: dict[str, list[int | str]]
    outputs: dict[str, list[int | str]]


class FileRecord(Strict):
    """One file of the entry."""

    sha256: Sha256
    size: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
    graph: GraphRecord | None = None
    """Of an ONNX file."""


class ModelRecord(Strict):
    """`predictors.spec.ModelSpec`, as it stands in the file."""

    model_id: str
    revision: str
    config_hash: str
    num_layers: Annotated[int, Field(gt=0)]
    num_experts: Annotated[int, Field(gt=0)]
    top_k: Annotated[int, Field(gt=0)]
    hidden_size: Annotated[int, Field(gt=0)]
    dtype: str


class Manifest(Strict):
    """The whole of `manifest.json`; its sha256 is the entry's digest and so names every byte."""

    format_version: Literal[1]
    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    """MODEL/PREDICTOR, for example `qwen2-moe-tiny/stride`."""
    kind: str
    """Row of `predictors.registry`."""
    options: dict[str, JsonValue]
    """Handed to the predictor's `from_files`."""
    model: ModelRecord
    signals: list[Signal]
    """What the predictor asks to be shown."""
    licence: str
    """SPDX identifier."""
    trace_digest: Sha256 | None
    """The trace it was trained on; None when no trace was needed."""
    metrics: dict[str, Scalar]
    """Means over held-out requests; the whole is in `metrics.json`. None means not measured."""
    parity: dict[str, Scalar]
    """Export against torch: tokens compared, share with the same top-k set, largest difference."""
    code_version: str
    created: str
    """UTC, ISO 8601."""
    files: dict[str, FileRecord]

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for path, record in files.items():
            check_path(path)
            if PurePosixPath(path).suffix not in SUFFIXES:
                raise ValueError(f"{path!r}: an entry holds only {', '.join(SUFFIXES)} files")
            if path.endswith(".onnx") and record.size > MAX_ONNX_BYTES:
                raise ValueError(f"{path!r}: {record.size:,} bytes, over {MAX_ONNX_BYTES:,}")
        return files

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(**self.model.model_dump())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Canonical JSON: the same manifest always has the same digest."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    @property
    def digest(self) -> str:
        return digest_of(self.to_bytes())


def parse_manifest(data: bytes, *, what: str) -> Manifest:
    """The manifest in these bytes (already checked by digest); ZooError naming the field."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise ZooError(f"{what} is not a manifest: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """A pydantic error on one line: the dotted field and what is wrong with it."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}"
        for one in error.errors(include_url=False, include_input=False)[:3]
    )


def records(files: Mapping[str, bytes], graphs: Mapping[str, GraphRecord]) -> dict[str, FileRecord]:
    """Digest and size of each file, in the order of their names, and what its graph is."""
    return {
        path: FileRecord(
            sha256=digest_of(files[path]), size=len(files[path]), graph=graphs.get(path)
        )
        for path in sorted(files)
    }
