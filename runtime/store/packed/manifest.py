"""The `manifest.json` of a packed store: its model, its layout and its checksums.

It is written last and holds its own digest and that of the checksum table, so that a manifest that
opens vouches for every byte of the store.
"""

import hashlib
import json
import math
import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError

from predictors.files import refuse_lfs_pointer
from predictors.records import (
    Count,
    ModelRecord,
    Positive,
    Sha256,
    StrictRecord,
    explain_validation_error,
)
from predictors.spec import ModelSpec
from runtime.errors import StoreError
from runtime.store.ggml.library import TYPES
from runtime.store.layout import ExpertLayout, Part, Piece, lay_out
from runtime.store.packed.coding import HQQ, Coding

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.bin"
VERSION = 2
MAX_MANIFEST_BYTES = 16 << 20
"""A layer takes about a kilobyte; far above, something else is meant."""
MIN_GROUP_SIZE = 8
"""The smallest that `moecast pack` writes."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class PartRecord(StrictRecord):
    """`runtime.store.layout.Part`."""

    parameter: str
    first: Count
    num_weights: Positive
    kind: str
    group_size: Count = 0
    meta_group_size: Count = 0
    offset: Count

    @property
    def piece(self) -> Piece:
        coding = Coding(self.kind, self.group_size, self.meta_group_size)
        return Piece(self.parameter, self.first, self.num_weights, coding)


class ParameterRecord(StrictRecord):
    shape: list[Positive]
    dtype: str


class ChunkRecord(StrictRecord):
    parts: list[PartRecord]
    end: Positive
    """End of the chunk in the record, in bytes."""


class LayerRecord(StrictRecord):
    """The experts of one layer: records of equal size in one file."""

    file: Annotated[str, Field(pattern=r"^layer-[0-9]{3,6}\.bin$")]
    num_experts: Positive
    parameters: dict[str, ParameterRecord]
    is_flipped: bool = False
    chunks: list[ChunkRecord]


class StoreContents(StrictRecord):
    """All that is known before the first expert is written."""

    format: Literal["moecast-packed"]
    version: int
    tool: str
    """Version of moecast that wrote it."""
    model: ModelRecord
    fingerprint: Sha256
    """Sampled digest of the checkpoint's weights (`runtime.store.model_source.fingerprint`)."""
    checksum: Literal["xxh3_64"]
    """Checksums of all chunks with padding; uint64, little-endian, by layer, expert, chunk."""
    layers: Annotated[list[LayerRecord], Field(min_length=1)]


class StoreManifest(StrictRecord):
    contents: StoreContents
    checksums_sha256: Sha256
    digest: Sha256
    """sha256 over the other two keys as canonical JSON."""


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def describe_contents(
    layouts: Sequence[ExpertLayout],
    experts_per_layer: Sequence[int],
    *,
    spec: ModelSpec,
    fingerprint: str,
    tool: str,
) -> StoreContents:
    return StoreContents(
        format="moecast-packed",
        version=VERSION,
        tool=tool,
        # Samples of the routers are read from the model, which a store does not replace.
        model=ModelRecord.from_spec(replace(spec, routers=None)),
        fingerprint=fingerprint,
        checksum="xxh3_64",
        layers=[
            _describe_layer(f"layer-{i:03d}.bin", layout, num_experts)
            for i, (layout, num_experts) in enumerate(zip(layouts, experts_per_layer, strict=True))
        ],
    )


def _describe_layer(file: str, layout: ExpertLayout, num_experts: int) -> LayerRecord:
    return LayerRecord(
        file=file,
        num_experts=num_experts,
        parameters={
            name: ParameterRecord(
                shape=list(shape), dtype=str(layout.dtypes[name]).removeprefix("torch.")
            )
            for name, shape in layout.shapes.items()
        },
        is_flipped=layout.is_flipped,
        chunks=[
            ChunkRecord(parts=[_part_record(part) for part in parts], end=end)
            for parts, end in zip(layout.chunks, layout.ends, strict=True)
        ],
    )


def _part_record(part: Part) -> PartRecord:
    known = vars(part) | vars(part.coding)
    return PartRecord(**{name: known[name] for name in PartRecord.model_fields})


def restore_layout(record: LayerRecord) -> ExpertLayout:
    """The layer's layout.

    Raises:
        ValueError: parts outside their chunk, parameters that are not filled, unknown dtypes.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in record.parameters.items()}
    dtypes = {name: DTYPES[parameter.dtype] for name, parameter in record.parameters.items()}
    chunks = [[part.piece for part in chunk.parts] for chunk in record.chunks]
    _check(shapes, chunks)
    layout = replace(lay_out(shapes, dtypes, chunks), is_flipped=record.is_flipped)
    # Bytes that no part explains are a sign that the integers which the manifest claims are
    # weights as they are.
    if _describe_layer(record.file, layout, record.num_experts) != record:
        raise ValueError("parts or chunks begin or end at other bytes than they would be put at")
    return layout


def _check(shapes: dict[str, tuple[int, ...]], chunks: list[list[Piece]]) -> None:
    filled = dict.fromkeys(shapes, 0)
    for part in (part for chunk in chunks for part in chunk):
        coding = part.coding
        if coding.kind not in ("", HQQ) and coding.kind not in TYPES:
            raise ValueError(f"{part.parameter}: type {coding.kind!r}")
        is_hqq = coding.kind == HQQ
        if is_hqq and (coding.group_size < MIN_GROUP_SIZE or coding.group_size % 2):
            raise ValueError(f"{part.parameter}: groups of {coding.group_size}")
        if is_hqq != bool(coding.group_size) or is_hqq != bool(coding.meta_group_size):
            raise ValueError(f"{part.parameter}: groups of {coding.kind or 'weights as they are'}")
        columns = shapes[part.parameter][-1] if coding.kind in TYPES else coding.block
        if columns % coding.block or part.num_weights % columns or part.first % columns:
            raise ValueError(f"{part.parameter}: no whole blocks of {coding.block}")
        if part.first != filled[part.parameter]:
            raise ValueError(f"{part.parameter}: weight {part.first} after a gap")
        filled[part.parameter] += part.num_weights
    for name, num_weights in filled.items():
        if num_weights != math.prod(shapes[name]):
            raise ValueError(f"{name}: {num_weights} weights for shape {shapes[name]}")
    if not chunks or not all(chunks):
        raise ValueError("a chunk without parts")


def seal_manifest(contents: StoreContents, checksums: bytes) -> bytes:
    """The file's bytes."""
    body = {
        "contents": contents.model_dump(),
        "checksums_sha256": hashlib.sha256(checksums).hexdigest(),
    }
    digest = hashlib.sha256(canonical_json(body)).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=1).encode()


def read_manifest(folder: Path) -> tuple[StoreContents, bytes]:
    """The contents of the store in `folder` and its checksum table.

    Raises:
        StoreError: no store, one of another version, or one that was damaged or altered.
    """
    file = folder / MANIFEST
    raw = read_plain(file, limit=MAX_MANIFEST_BYTES)
    again = suggest_packing(folder)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{file} is damaged: no JSON ({error}); {again}") from error
    contents = value.get("contents") if isinstance(value, dict) else None
    if isinstance(contents, dict) and contents.get("format") == "moecast-packed":
        version = contents.get("version")
        if version != VERSION:
            raise StoreError(
                f"{file} has format version {version!r}, this moecast reads {VERSION}; {again}"
            )
    try:
        manifest = StoreManifest.model_validate(value, strict=True)
    except ValidationError as error:
        what = explain_validation_error(error)
        raise StoreError(f"{file} is no manifest of a packed store: {what}; {again}") from error
    body = {key: value[key] for key in ("contents", "checksums_sha256")}
    if hashlib.sha256(canonical_json(body)).hexdigest() != manifest.digest:
        raise StoreError(f"{file} is damaged: its digest does not fit; {again}")
    table = folder / CHECKSUMS
    checksums = read_plain(table, limit=MAX_MANIFEST_BYTES * 64)
    if hashlib.sha256(checksums).hexdigest() != manifest.checksums_sha256:
        raise StoreError(f"{table} is damaged: its sha256 is not the manifest's; {again}")
    return manifest.contents, checksums


def suggest_packing(folder: Path) -> str:
    output = shlex.quote(f"output={folder}")
    return f"pack the model again (moecast pack MODEL {output} overwrite=true, options as before)"


def read_plain(file: Path, *, limit: int) -> bytes:
    """A regular file of at most `limit` bytes; links could lead out of the folder."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise StoreError(
            f"{file}: {error.strerror}; a packed store is a folder that moecast pack made"
        ) from error
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise StoreError(f"{file} is not a plain file; a store holds its own files only")
        data = opened.read(limit + 1)
    refuse_lfs_pointer(data, str(file), StoreError)
    if len(data) > limit:
        raise StoreError(f"{file} is longer than {limit} bytes; this is no packed store")
    return data
