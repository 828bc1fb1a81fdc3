"""Packs a model's experts: resumable at any point, published atomically.

Next to the output PATH, `.NAME.packing/DIGEST/` holds `store/` (the folder to be) and `sums/` (the
checksums of its files). DIGEST is that of the contents. A layer is one file, which has its name
when it is whole: a run that was killed begins the layer again at which it was.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from predictors.files import publish_folder, sync_folder, write_atomic
from runtime.errors import StoreError, TransferError
from runtime.store.base import ExpertStore, allocate_aligned, as_memoryview, max_slot_bytes
from runtime.store.files import FileReader, write_whole
from runtime.store.ggml.library import encode_rows
from runtime.store.ggml.matrix import ExpertWeights, QuantisedExpert
from runtime.store.layout import ExpertLayout
from runtime.store.packed.coding import HQQ, RAW, encode, quantise_half_quadratic
from runtime.store.packed.manifest import (
    CHECKSUMS,
    MANIFEST,
    StoreContents,
    canonical_json,
    read_manifest,
    restore_layout,
    seal_manifest,
)
from runtime.store.packed.store import PackedStore, open_store

SPARE_BYTES = 16 << 20
"""Room for the manifest, the checksums and the file system's own tables."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Advance = Callable[[int], None]
FillRecord = Callable[[int, int, Tensor], None]
"""Fills a record, uint8 `(num_bytes,)`, for a layer and an expert; `TransferError` if it cannot."""


@dataclass(frozen=True, kw_only=True)
class PackSummary:
    """Results of a run of `pack`."""

    num_bytes: int
    written: int
    """Experts written by this run."""
    kept: int
    """Experts that were there and have been verified."""


def pack(
    source: ExpertStore,
    contents: StoreContents,
    output: Path,
    *,
    overwrite: bool = False,
    advance: Advance = lambda _: None,
) -> PackSummary:
    """Writes the experts of a checkpoint as `write_store`; raises as it does."""
    layouts = [restore_layout(record) for record in contents.layers]
    slot = allocate_aligned(max_slot_bytes(source))

    def fill(layer: int, expert: int, record: Tensor) -> None:
        held = source.layouts[layer]
        source.read(layer, expert, range(len(held.chunks)), slot)
        fill_record(layouts[layer], held, slot[: held.num_bytes], record)

    return write_store(fill, contents, output, overwrite=overwrite, advance=advance)


def write_store(
    fill: FillRecord,
    contents: StoreContents,
    output: Path,
    *,
    overwrite: bool = False,
    advance: Advance = lambda _: None,
) -> PackSummary:
    """Writes the store that `contents` describes to `output`, or finds it there.

    Args:
        fill: called for the experts in order, layer by layer.
        advance: called with the number of experts done since the last call.

    Raises:
        StoreError: no room, a full disk, something else at `output`, another run at work.
        TransferError: an expert could not be read.
    """
    output = output.absolute()
    work = output.parent / f".{output.name}.packing"
    own = work / digest_contents(contents)
    existing = _existing(output, contents, overwrite=overwrite)
    if existing is None:
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _locked(work):
                # Another run may have come to its end since.
                existing = _existing(output, contents, overwrite=overwrite)
                if existing is None:
                    return _write_folder(fill, contents, output, own, advance)
        except FileNotFoundError as error:
            raise StoreError(
                f"{error.filename} was removed while packing {output}; run the same command again"
            ) from error
        except OSError as error:
            if error.errno in FULL:
                cause = f"the disk is full ({error.strerror})"
                cure = f"{total_bytes(contents)} bytes are needed in all: make room"
            else:
                cause, cure = f"the disk fails ({error})", "check the disk"
            raise StoreError(
                f"{cause} while packing {output}. What is packed is kept in {work}; {cure} and run "
                "the same command again, or delete that folder"
            ) from error
    _verify(existing, advance)
    if own.exists():
        with suppress(OSError, StoreError), _locked(work):
            shutil.rmtree(own)
    kept = sum(existing.experts_per_layer)
    return PackSummary(num_bytes=total_bytes(contents), written=0, kept=kept)


def _write_folder(
    fill: FillRecord, contents: StoreContents, output: Path, own: Path, advance: Advance
) -> PackSummary:
    """Writes the store in `own`, which is removed at the end."""
    store, sums = _prepare(own, contents)
    _require_room(contents, store, output)
    written, kept = _write_layers(fill, contents, store, sums, advance)
    checksums = b"".join((sums / layer.file).read_bytes() for layer in contents.layers)
    write_atomic(store / CHECKSUMS, checksums)
    write_atomic(store / MANIFEST, seal_manifest(contents, checksums))
    sync_folder(store)
    publish_folder(store, output)
    shutil.rmtree(own)  # with the store that was replaced
    return PackSummary(num_bytes=total_bytes(contents), written=written, kept=kept)


def digest_contents(contents: StoreContents) -> str:
    return hashlib.sha256(canonical_json(contents.model_dump())).hexdigest()


def total_bytes(contents: StoreContents) -> int:
    return sum(one.chunks[-1].end * one.num_experts for one in contents.layers)


def _existing(output: Path, contents: StoreContents, *, overwrite: bool) -> PackedStore | None:
    """Return the store if it is complete; None if there is none, or one that may be replaced."""
    if not output.exists() and not output.is_symlink():
        return None
    if not (output / MANIFEST).is_file() or output.is_symlink():
        raise StoreError(f"{output} exists and is no packed store; choose another output=PATH")
    if overwrite:
        return None
    existing, _ = read_manifest(output)
    # A later moecast writes the same store under another version.
    if existing.model_copy(update={"tool": contents.tool}) != contents:
        raise StoreError(
            f"{output} is a packed store of {_describe(existing)}, not of {_describe(contents)}; "
            "choose another output=PATH, or overwrite=true"
        )
    return open_store(output, None)


def _describe(contents: StoreContents) -> str:
    chunks = (chunk for layer in contents.layers for chunk in layer.chunks)
    kinds = {part.kind for chunk in chunks for part in chunk.parts}
    formats = " and ".join(sorted(kind or contents.model.dtype for kind in kinds))
    model = contents.model
    return (
        f"{model.model_id} {model.revision[:12]} in {formats} (weights {contents.fingerprint[:12]})"
    )


def _verify(store: PackedStore, advance: Advance) -> None:
    """Reads every record, and closes the store."""
    slot = allocate_aligned(max_slot_bytes(store))
    try:
        for layer, layout in enumerate(store.layouts):
            for expert in range(store.experts_per_layer[layer]):
                store.read(layer, expert, range(len(layout.chunks)), slot)
                advance(1)
    except TransferError as error:
        raise StoreError(f"{store.folder} is damaged: {error}") from error
    finally:
        store.close()


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Holds the lock of the folder, which is removed at the end if nothing is in it."""
    is_held = False
    while not is_held:
        with suppress(FileExistsError):
            work.mkdir()
        # The run that has the lock removes the folder at its end: at any moment here.
        with suppress(FileNotFoundError):
            handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = os.path.samestat(os.fstat(handle), work.stat())
            except BlockingIOError as error:
                why = f"another process is packing in {work}; wait for its end"
                raise StoreError(why) from error
            finally:
                if not is_held:
                    os.close(handle)
    try:
        yield
    finally:
        with suppress(OSError):
            work.rmdir()
        os.close(handle)


def _prepare(own: Path, contents: StoreContents) -> tuple[Path, Path]:
    """Makes `store/` and `sums/` of these contents; others' are removed."""
    for other in own.parent.iterdir():
        if other != own:
            shutil.rmtree(other)
    store, sums = own / "store", own / "sums"
    for folder in (store, sums):
        folder.mkdir(parents=True, exist_ok=True)
    # After a kill right behind the exchange of names, `store` is the one that was replaced.
    for file in store.iterdir():
        if file.name not in {layer.file for layer in contents.layers}:
            file.unlink()
    return store, sums


def _require_room(contents: StoreContents, store: Path, output: Path) -> None:
    there = sum(path.stat().st_blocks * 512 for path in store.iterdir())
    needed = max(0, total_bytes(contents) - there) + SPARE_BYTES
    free = shutil.disk_usage(store).free
    if free < needed:
        raise StoreError(
            f"no room to pack {output}: {needed} bytes are needed, the disk has {free} free; "
            "choose another output=PATH, or make room"
        )


def _write_layers(
    fill: FillRecord, contents: StoreContents, store: Path, sums: Path, advance: Advance
) -> tuple[int, int]:
    """Experts written and kept."""
    written = kept = 0
    for layer, record in enumerate(contents.layers):
        layout, num_experts = restore_layout(record), record.num_experts
        file, table = store / record.file, sums / record.file
        if _is_whole(file, table, layout, num_experts):
            kept += num_experts
            advance(num_experts)
            continue
        partial = file.with_suffix(".part")
        buffer = allocate_aligned(layout.num_bytes)
        checksums: list[list[int]] = []
        with partial.open("wb", buffering=0) as opened:
            for expert in range(num_experts):
                fill(layer, expert, buffer)
                write_whole(opened.fileno(), as_memoryview(buffer), expert * layout.num_bytes)
                checksums.append(compute_checksums(layout, buffer))
                advance(1)
            os.fsync(opened.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        write_atomic(table, np.array(checksums, dtype="<u8").tobytes())
        partial.replace(file)
        written += num_experts
    return written, kept


def _is_whole(file: Path, table: Path, layout: ExpertLayout, num_experts: int) -> bool:
    """Whether a file has all its records, each with the checksums in the table."""
    if not file.exists() or not table.exists():
        return False
    checksums = np.frombuffer(table.read_bytes(), dtype="<u8").reshape(num_experts, -1).tolist()
    record = allocate_aligned(layout.num_bytes)
    with FileReader() as reader, suppress(TransferError):
        for i, expected in enumerate(checksums):
            reader.read(file, i * len(record), as_memoryview(record), what=f"expert {i}")
            if compute_checksums(layout, record) != expected:
                return False
        return True
    return False


def fill_record(layout: ExpertLayout, held: ExpertLayout, slot: Tensor, record: Tensor) -> None:
    """Lays an expert out in `record`, uint8 `(num_bytes,)`; what is between parts is zero.

    Args:
        held: of `slot`, with the same parts; those of another coding are weights as they are.
    """
    record.zero_()
    weights: ExpertWeights | None = None
    for part, own in zip(layout.parts, held.parts, strict=True):
        if part.coding == own.coding and not layout.is_flipped:
            record[part.offset : part.end].copy_(slot[own.offset : own.end])
            continue
        if weights is None:
            weights = held.weights(slot)
        assert not isinstance(weights, QuantisedExpert), "integers are not quantised again"
        matrix = weights[part.parameter]
        if layout.is_flipped and matrix.dim() > 1:
            matrix = matrix.t()
        flat = matrix.reshape(-1)[part.first : part.first + part.num_weights]
        if part.coding == RAW:
            stored = flat.view(torch.uint8)
        elif part.coding.kind == HQQ:
            encode(part.coding, quantise_half_quadratic(part.coding, flat), record[part.offset :])
            continue
        else:
            rows = flat.view(-1, layout.shapes[part.parameter][-1])
            stored = encode_rows(part.coding.kind, rows)
        record[part.offset : part.offset + len(stored)].copy_(stored)


def compute_checksums(layout: ExpertLayout, record: Tensor) -> list[int]:
    """xxh3_64 of each chunk, padding included."""
    view = as_memoryview(record)
    return [xxhash.xxh3_64_intdigest(view[a:b]) for [(a, b)] in layout.chunk_ranges]
