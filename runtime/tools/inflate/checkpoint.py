"""Write the inflated checkpoint as a folder in the Hub's layout, atomically."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from predictors.files import sync_folder, write_atomic
from predictors.units import MIB
from runtime.errors import CheckpointError
from runtime.store.files import FileReader
from runtime.store.model_source import DIGESTS, INFLATED, is_weights
from runtime.store.safetensors_header import make_header
from runtime.tools.inflate.inflation_plan import InflationPlan
from runtime.tools.inflate.shards import shard_size, split_shards, write_shard

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
            write_shard(partial / name, shard, reader, advance)
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
