"""Check that a model's files are complete and unaltered."""

import json
import re
from pathlib import Path
from typing import Any

from runtime.store.gguf.header import is_gguf, read_header
from runtime.store.model_check import list_weight_files
from runtime.store.model_source import DIGESTS, require_digest
from runtime.store.tensor_index import read_tensor_index


def check_files(folder: Path, *, digests: bool) -> dict[str, Any]:
    """Check headers and sizes, and with `digests` the sha256 of each file if known.

    Raises:
        CheckpointError: a file is damaged, truncated, missing or altered.
    """
    files, has_digests = list_weight_files(folder), not is_gguf(folder)
    tensors = read_tensor_index(files) if has_digests else read_header(folder).tensors
    facts: dict[str, Any] = {
        "files": len(files),
        "tensors": len(tensors),
        "bytes": sum(file.stat().st_size for file in files),
        "digests": "not checked (digests=true checks them)"
        if has_digests
        else "not known of GGUF files",
    }
    if digests and has_digests:
        known = known_digests(folder, files)
        for file, expected in known.items():
            require_digest(file, expected, otherwise="download the model again")
        facts["digests"] = f"{len(known)} of {len(files)} files equal their known sha256"
    return facts


def known_digests(folder: Path, files: list[Path]) -> dict[Path, str]:
    """Return the known sha256 of files: of a bundled model, or from the Hub cache's blob names."""
    listed = json.loads((folder / DIGESTS).read_text()) if (folder / DIGESTS).is_file() else {}
    known = {}
    for file in files:
        blob = file.resolve().name
        digest = listed.get(file.name) or (blob if re.fullmatch(r"[0-9a-f]{64}", blob) else None)
        if digest is not None:
            known[file] = digest
    return known
