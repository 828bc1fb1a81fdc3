"""The zoo's command faces: each prints for people and returns the same as plain values."""

from typing import Any

from rich.console import Console

from predictors.table import escape_controls
from zoo.entry import ZooEntry


def summarize(entry: ZooEntry) -> dict[str, Any]:
    """Returns what every command tells about an entry; its size is in bytes."""
    manifest = entry.manifest
    return {
        "name": manifest.name,
        "digest": manifest.digest,
        "kind": manifest.kind,
        "model": manifest.model.model_id,
        "metrics": dict(manifest.metrics),
        "size": manifest.size,
        "where": entry.where,
    }


def print_line(line: str) -> None:
    """Prints one line, never wrapped or coloured, so that paths in it can be copied."""
    Console().print(escape_controls(line), markup=False, highlight=False, soft_wrap=True)
