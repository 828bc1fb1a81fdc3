"""Tells checkpoints apart that differ in nothing but their numbers.

A local folder has no commit, and after another training run its headers are the same: a store
packed before would serve the old experts to the new attention, without a word.
"""

import hashlib
from pathlib import Path

from runtime.store.model_source import is_weights

SAMPLES = 64
"""Of each file, evenly spaced: some in every layer of a file of a few layers."""
SAMPLE_BYTES = 4096


def fingerprint(folder: Path) -> str:
    """sha256 over name, size and samples of every weights file; reads 256 KiB of each.

    It tells what was trained on from what was not, not what was altered by a few bytes.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if is_weights(path.name)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb", buffering=0) as handle:
            for i in range(SAMPLES):
                handle.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(handle.read(SAMPLE_BYTES))
    return digest.hexdigest()
