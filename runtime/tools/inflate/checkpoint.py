"""Write the inflated checkpoint as a folder in the Hub's layout, atomically.

Tensors are streamed into safetensors files, one expert in memory at a time.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from predictors.files import sync_folder, write_atomic
from predictors.units import MIB
from runtime.errors import CheckpointError
from runtime.store.base import as_memoryview
from runtime.store.dense_folder import read_pieces, write_tensors
from runtime.store.files import FileReader
from runtime.store.model_source import DIGESTS, INFLATED, is_weights
from runtime.store.tensor_index import make_header
from runtime.tools.inflate.inflation_plan import InflationPlan, TensorTarget

SHARD_BYTES = 2**30
"""Bytes of a file, and most bytes that a resumed run writes again."""
NOT_COPIED = ("config.json", DIGESTS, INFLATED, "audit.json", "README.md")
"""Files that are replaced, or describe the original only."""
SLACK_BYTES = 64 * MIB
"""Free disk required in addition to the tensors, for headers and tokenizer."""


def partial_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.partial")


def write_checkpoint(
    plan: InflationPlan,
    output: Path,
    *,
    origin: dict[str, str],
    advance: Callable[[int], None],
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the checkpoint, resuming an interrupted run; returns the number of files written.

    Args:
        origin: `identity` of the source model, whose predictors stay valid.
        advance: called with the number of bytes written.

    Raises:
        CheckpointError: `output` exists, or the disk is too small.
    """
    if output.exists():
        raise CheckpointError(f"{output} exists; remove it or give another output=PATH")
    shards = split_shards(plan.targets, shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    partial = partial_folder(output)
    # Headers contain all names, shapes, dtypes and offsets: equal headers mean equal plans.
    headers = hashlib.sha256(b"".join(map(make_header, shards))).hexdigest()
    identity = {"headers": headers, "origin": origin}
    known = partial / "plan.json"
    if partial.exists() and (not known.is_file() or json.loads(known.read_text()) != identity):
        shutil.rmtree(partial)
    missing = [
        (name, shard)
        for name, shard in zip(names, shards, strict=True)
        if not (partial / name).is_file()
    ]
    need = sum(shard_size(shard) for _, shard in missing) + SLACK_BYTES
    output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output.parent).free
    if need > free:
        raise CheckpointError(
            f"{output.parent}: {need} bytes are needed and {free} are free; free space, give "
            "another output=PATH, or a smaller expert_size"
        )
    partial.mkdir(exist_ok=True)
    write_atomic(known, json.dumps(identity, indent=2).encode())
    advance(plan.num_bytes - sum(t.num_bytes for _, s in missing for t in s.values()))
    reader = FileReader()
    try:
        for name, shard in missing:
            pieces = iterate_pieces(shard.values(), reader)
            write_tensors(partial / name, shard, pieces, advance)
    finally:
        reader.close()
    write_description(plan, partial, dict(zip(names, shards, strict=True)), origin)
    known.unlink()
    sync_folder(partial)
    partial.replace(output)
    sync_folder(output.parent)
    return len(missing)


def write_description(
    plan: InflationPlan, folder: Path, shards: dict, origin: dict[str, str]
) -> None:
    """Write all files but the tensors: index, configuration, tokenizer and provenance."""
    index = {
        "metadata": {"total_size": plan.num_bytes},
        "weight_map": {key: name for name, shard in shards.items() for key in shard},
    }
    inflated = {
        "origin": origin,
        "field": plan.width.field,
        "neurons": [plan.width.neurons, plan.neurons],
        "expert_bytes": [plan.expert_bytes_before, plan.expert_bytes],
    }
    written = {
        "model.safetensors.index.json": index,
        "config.json": plan.config,
        INFLATED: inflated,
    }
    for name, tree in written.items():
        write_atomic(folder / name, (json.dumps(tree, indent=2) + "\n").encode())
    for file in plan.folder.iterdir():
        copied = file.is_file() and file.suffix in (".json", ".jinja", ".model", ".txt")
        if copied and file.name not in (*NOT_COPIED, *written) and not is_weights(file.name):
            write_atomic(folder / file.name, file.read_bytes())


def split_shards(
    targets: dict[str, TensorTarget], shard_bytes: int
) -> list[dict[str, TensorTarget]]:
    """Split the tensors in order into files of at most `shard_bytes`, or one larger tensor."""
    shards: list[dict[str, TensorTarget]] = [{}]
    size = 0
    for key, target in targets.items():
        if shards[-1] and size + target.num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = target
        size += target.num_bytes
    return shards


def shard_size(shard: dict[str, TensorTarget]) -> int:
    """Bytes of the whole file."""
    return len(make_header(shard)) + sum(target.num_bytes for target in shard.values())


def iterate_pieces(targets: Iterable[TensorTarget], reader: FileReader) -> Iterator[memoryview]:
    """Yield the tensors' bytes in order, one expert at a time for stacked experts."""
    for target in targets:
        source = target.source
        if target.axis is None:
            # The conversion is elementwise: cut anywhere.
            for raw in read_pieces(source, reader):
                yield as_memoryview(raw.view(source.dtype).to(target.dtype))
            continue
        stacked = len(source.shape) == 3
        for part in map(source.slice, range(source.shape[0])) if stacked else [source]:
            tensor = torch.empty(part.shape, dtype=part.dtype)
            reader.read(part.file, part.offset, as_memoryview(tensor), what=part.key)
            yield as_memoryview(target.grown(tensor, target.axis - 1 if stacked else target.axis))
