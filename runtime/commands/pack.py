"""`moecast pack`: write a model's experts to a packed store with checksums."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from predictors.files import expand_home
from predictors.origin import package_version
from predictors.units import MIB
from runtime.commands.progress import print_line, progress
from runtime.config import PackConfig, Quantise
from runtime.errors import StoreError
from runtime.hf.loading import load_stripped
from runtime.hf.strip import list_source_tensors
from runtime.store.base import ExpertStore
from runtime.store.gguf.header import is_gguf
from runtime.store.layout import ExpertLayout, build_packed_layout, name_kind
from runtime.store.model_source import fingerprint, identity, resolve
from runtime.store.packed.coding import HQQ, RAW, Coding
from runtime.store.packed.manifest import describe_contents
from runtime.store.packed.writer import pack, total_bytes
from runtime.store.rewritten import write_without_experts

HQQ_GROUP_SIZE = 64
META_GROUP_SIZE, SMALLEST_BLOCK = 128, 32
"""Scales and zeros of `hqq` that are quantised together: "a zero scale group size of 128" (Klotski,
section 7)."""


def choose_coding(quantise: Quantise, group_size: int | None = None) -> Coding:
    """Returns how experts are stored."""
    if quantise is Quantise.NONE:
        return RAW
    if quantise is Quantise.HQQ:
        return Coding(HQQ, group_size or HQQ_GROUP_SIZE, META_GROUP_SIZE)
    return Coding(name_kind(quantise.value))


def find_unquantised(layouts: Sequence[ExpertLayout], coding: Coding) -> list[str]:
    """List matrices that cannot be quantised, as their rows do not divide.

    Raises:
        StoreError: no matrix can.
    """
    parts = [(matrix.parameter, matrix.coding) for layout in layouts for matrix in layout.matrices]
    left = sorted({name for name, how in parts if how == RAW})
    if left and all(how == RAW for _, how in parts):
        raise StoreError(
            f"quantise: rows of {', '.join(left)} are no multiple of "
            f"{coding.group_size or SMALLEST_BLOCK} weights; choose "
            + ("another group_size" if coding.group_size else "quantise=hqq with a group_size")
        )
    return left


def plan_records(
    source: ExpertStore, coding: Coding, checkpoint: Path, *, flips: bool
) -> list[ExpertLayout]:
    """Return the layouts of the records.

    Args:
        flips: the model has matrices that kernels would multiply transposed.

    Raises:
        StoreError: integers are to be quantised again.
    """
    if coding != RAW and not all(layout.is_plain for layout in source.layouts):
        raise StoreError(
            f"quantise: the experts of {checkpoint} are stored as they are read from it; leave it "
            "out, or quantise the original checkpoint"
        )
    return [build_packed_layout(one, coding=coding, flips=flips) for one in source.layouts]


def run(config: PackConfig) -> dict[str, Any]:
    """Pack the experts, resume an interrupted run, or verify a complete store."""
    coding = choose_coding(config.quantise, config.group_size)
    output = expand_home(config.output).resolve()
    folder = resolve(config.model)
    if config.dense_output is not None and is_gguf(folder):
        raise StoreError(
            f"dense_output: {folder} is a GGUF file, which cannot be written without its experts; "
            "leave dense_output out and keep the file"
        )
    stripped = load_stripped(folder, config.model.dtype)
    source = stripped.open_store(decodes=coding != RAW or not stripped.holds_integers)
    layouts = plan_records(source, coding, folder, flips=stripped.multiplies_columns)
    left = [] if coding == RAW else find_unquantised(layouts, coding)
    if left:
        print_line(
            f"not quantised, because {coding.group_size or SMALLEST_BLOCK} weights do not divide "
            "their rows: " + ", ".join(left)
        )
    contents = describe_contents(
        layouts,
        source.experts_per_layer,
        spec=stripped.spec(folder, config.model),
        fingerprint=fingerprint(folder),
        tool=package_version("moecast") or "not installed",
    )
    in_memory = sum(
        layout.num_bytes * num_experts
        for layout, num_experts in zip(source.layouts, source.experts_per_layer, strict=True)
    )
    num_experts = sum(source.experts_per_layer)
    print_line(
        f"{num_experts} experts of {config.model.name}: {in_memory / MIB:.1f} MiB in memory, "
        f"{total_bytes(contents) / MIB:.1f} MiB packed"
    )
    started = time.monotonic()
    try:
        with progress(Console(stderr=True), "packing", total=num_experts) as advance:
            done = pack(source, contents, output, overwrite=config.overwrite, advance=advance)
    finally:
        source.close()
    seconds = time.monotonic() - started
    dense = None if config.dense_output is None else expand_home(config.dense_output).resolve()
    if dense is not None:
        write_without_experts(
            folder,
            dense,
            dropped=list_source_tensors(stripped.plans) | stripped.unused,
            origin=identity(folder, config.model),
        )
    served_from = shlex.quote(f"store.path={output}")
    print_line(
        f"{output}: {done.written} experts written, {done.kept} existing ones verified, in "
        f"{seconds:.1f} s; serve them with {served_from}"
    )
    if dense is not None:
        print_line(
            f"{dense}: the model without its experts; serve it without the checkpoint: moecast "
            f"serve {shlex.quote(str(dense))} {served_from}"
        )
    return {
        "output": str(output),
        "dense_output": None if dense is None else str(dense),
        "source": str(folder),
        "quantise": config.quantise.value,
        "group_size": coding.group_size or None,
        "not_quantised": left,
        "num_experts": num_experts,
        "experts_written": done.written,
        "experts_verified": done.kept,
        "plain_bytes": in_memory,
        "packed_bytes": done.num_bytes,
        "seconds": seconds,
    }
