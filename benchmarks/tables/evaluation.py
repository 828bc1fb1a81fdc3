"""The committed results of `moecast evaluate` and `moecast bench`."""

from typing import Any

from benchmarks.tables.markdown import read_document

LIVE = ("bench", "bench-10-75")
"""Committed results of `moecast bench`: of all systems, and of a few at two more budgets."""


def read_evaluation() -> dict[str, Any] | None:
    """Reads `benchmarks/results/evaluate.json`; None if it does not exist."""
    return read_document("evaluate")


def read_live() -> list[dict[str, Any]]:
    """Returns the rows of the live runs of batch 1, which may be of several days, by budget.

    In rows of earlier versions the mean is that of their steps; intervals were not measured.
    """
    rows: list[dict[str, Any]] = []
    for name in LIVE:
        budgets = {row["budget"] for row in rows}
        for row in (read_document(name) or {"rows": []})["rows"]:
            if row["batch"] == 1 and not row.get("failed") and row["budget"] not in budgets:
                steps = row.get("steps")
                mean = sum(steps) / len(steps) if steps else None
                rows.append({"tpot_mean_seconds": mean, "tpot_interval_seconds": None, **row})
    return sorted(rows, key=lambda row: float(row["budget"].rstrip("%")))
