"""The zoo's command faces: each prints for people and returns the same as plain values."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from predictors.terminal import escape_controls
from zoo.entry import ZooEntry


@dataclass(frozen=True)
class EntrySummary:
    name: str
    digest: str
    kind: str
    model: str
    metrics: dict[str, Any]
    size: int
    """In bytes."""
    where: str


def summarize(entry: ZooEntry) -> EntrySummary:
    manifest = entry.manifest
    return EntrySummary(
        name=manifest.name,
        digest=manifest.digest,
        kind=manifest.kind,
        model=manifest.model.model_id,
        metrics=dict(manifest.metrics),
        size=manifest.size,
        where=entry.where,
    )


def print_line(line: str) -> None:
    """Prints one line, never wrapped or coloured, so that paths in it can be copied."""
    Console().print(escape_controls(line), markup=False, highlight=False, soft_wrap=True)
