"""How fast experts come from the disk: in place with each setting of the page cache, and packed.

    python -m runtime inflate expert_size=8MiB model.dtype=bfloat16 output=large
    python -m runtime pack model.id=large model.dtype=bfloat16 output=packed
    python benchmarks/reads.py model=large store=packed output=benchmarks/results/reads.json

Whole experts at random, one thread, ways interleaved, nothing of the files in memory at the start
of each; medians of the repetitions.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from runtime.config import PageCache
from runtime.engine.loading import load_stripped
from runtime.hf.layers import moe_layers
from runtime.store.base import ExpertStore
from runtime.store.checkpoint import CheckpointStore
from runtime.store.packed import open_store
from runtime.store.packed.journal import aligned_bytes

REPETITIONS = 5
EXPERTS = 96


def forget(folder: Path) -> None:
    """Drops the folder's files from the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remembered(folder: Path) -> int:
    """Bytes of the folder's files in the page cache, by util-linux' fincore."""
    command = ["fincore", "--noheadings", "--bytes", "--output", "RES", *map(str, folder.iterdir())]
    return sum(map(int, subprocess.check_output(command, text=True).split()))


def measure(store: ExpertStore, folder: Path, *, seed: int) -> dict[str, float]:
    """Reads experts at random into one slot."""
    forget(folder)
    every = [(i, e) for i, n in enumerate(store.experts_per_layer) for e in range(n)]
    chosen = random.Random(seed).sample(every, EXPERTS)
    slot = aligned_bytes(max(layout.num_bytes for layout in store.layouts))
    started, processor = time.perf_counter(), time.process_time()
    num_bytes = 0
    for layer, expert in chosen:
        chunk_bytes = store.layouts[layer].chunk_bytes
        store.read(layer, expert, range(len(chunk_bytes)), slot)
        num_bytes += sum(chunk_bytes)
    seconds = time.perf_counter() - started
    return {
        "gigabytes_per_second": num_bytes / seconds / 1e9,
        "cpu_ms_per_expert": 1000 * (time.process_time() - processor) / EXPERTS,
        "left_in_page_cache": remembered(folder) / num_bytes,
    }


def main(arguments: dict[str, str]) -> None:
    model, packed = Path(arguments["model"]), Path(arguments["store"])
    stripped, banks = load_stripped(model, "auto", torch.device("cpu"))
    recipes = [banks[layer.name] for layer in moe_layers(stripped)]
    ways: dict[str, tuple[ExpertStore, Path]] = {}
    for page_cache in PageCache:
        in_place = CheckpointStore(stripped, recipes, page_cache=page_cache)
        ways[f"in place, page_cache={page_cache}"] = in_place, model
    for page_cache in (PageCache.BYPASS, PageCache.DROP):
        ways[f"packed, page_cache={page_cache}"] = (
            open_store(packed, None, page_cache=page_cache),
            packed,
        )
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for seed in range(REPETITIONS):
        for way, (store, folder) in ways.items():
            runs[way].append(measure(store, folder, seed=seed))
    rows: list[dict[str, Any]] = []
    for way, found in runs.items():
        rows.append(
            {"way": way}
            | {key: statistics.median(one[key] for one in found) for key in found[0]}
            | {"all_gigabytes_per_second": [one["gigabytes_per_second"] for one in found]}
        )
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
    results = {
        "expert_bytes": ways["in place, page_cache=bypass"][0].layouts[0].num_bytes,
        "experts_read": EXPERTS,
        "repetitions": REPETITIONS,
        "load_average_at_end": os.getloadavg()[0],
        "rows": rows,
    }
    Path(arguments["output"]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(one.split("=", 1) for one in sys.argv[1:]))
