"""Tables in Markdown, and results that may not be there."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def result(name: str) -> dict[str, Any] | None:
    """What `benchmarks/results/NAME.json` holds; None where it was not measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def figure(value: float | str | None, digits: int = 3, unit: str = "") -> str:
    """A dash for what was not measured, never a zero; words as they are."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    """A share as people write it."""
    return "-" if value is None else f"{100 * value:.0f} %"


def size(num_bytes: float) -> str:
    """In MiB or KiB."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} KiB"
