"""The committed results of `moecast evaluate` and `moecast bench`."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables.markdown import read_document


def read_evaluation() -> dict[str, Any] | None:
    """Reads `benchmarks/results/evaluate.json`; None if it does not exist."""
    return read_document("evaluate")


def read_all_live() -> list[dict[str, Any]]:
    report = read_document("bench") or {"rows": []}
    return [row for row in report["rows"] if row["batch"] == 1 and not row.get("failed")]


def read_live() -> list[dict[str, Any]]:
    """Returns the rows of the live runs of batch 1, without bounds that a run has beaten."""
    rows = read_all_live()
    beaten = find_beaten_bounds(rows)
    return [row for row in rows if not (row["simulated"] and row["budget"] in beaten)]


def find_beaten_bounds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the budgets at which a run was faster than the bound.

    The bound is simulated with the machine's times as they were measured; it fails where other work
    slowed the machine then, and nothing that was simulated with these times is comparable.
    """
    beaten = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        own = [row for row in rows if row["budget"] == budget]
        bounds = [row["tpot_mean_seconds"] for row in own if row["system"] == "bound"]
        live = [row["tpot_mean_seconds"] for row in own if not row["simulated"]]
        if bounds and live and min(live) < bounds[0]:
            beaten.append(budget)
    return beaten


def beaten_line() -> str:
    """Returns a sentence on the bounds that are left out; empty if there are none."""
    beaten = find_beaten_bounds(read_all_live())
    if not beaten:
        return ""
    return (
        f" At {', '.join(beaten)} the bound and `oracle` are left out: a run was faster than the "
        "bound, whose times were measured while the machine was slower."
    )
