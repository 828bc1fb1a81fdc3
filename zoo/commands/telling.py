"""What several commands say of an entry, and how."""

from typing import Any

from rich.console import Console

from zoo.entry import Entry


def summary(entry: Entry) -> dict[str, Any]:
    """What a list says of an entry."""
    manifest = entry.manifest
    return {
        "name": manifest.name,
        "digest": manifest.digest,
        "kind": manifest.kind,
        "model": manifest.model.model_id,
        "metrics": manifest.metrics,
        "size": manifest.size,
        "where": entry.where,
    }


def figure(value: Any) -> str:
    """A number for people; a word where there is none."""
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report(line: str) -> None:
    """One line, never wrapped or coloured: paths in it can be copied."""
    Console().print(line, markup=False, highlight=False, soft_wrap=True)
