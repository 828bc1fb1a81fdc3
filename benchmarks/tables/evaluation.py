"""The committed results of `moecast evaluate` and `moecast bench`."""

from typing import Any

from benchmarks.tables.markdown import read_document


def read_evaluation() -> dict[str, Any] | None:
    """Reads `benchmarks/results/evaluate.json`; None if it does not exist."""
    return read_document("evaluate")


def read_live() -> list[dict[str, Any]]:
    """Returns the rows of the live runs of batch 1."""
    report = read_document("bench") or {"rows": []}
    return [row for row in report["rows"] if row["batch"] == 1 and not row.get("failed")]
