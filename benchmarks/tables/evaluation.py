"""The committed results of `moecast evaluate` and `moecast bench`."""

from typing import Any

from benchmarks.tables.markdown import read_document

LIVE = ("bench", "bench-10-75")
"""Committed results of `moecast bench`: of all systems, and of a few at two more budgets."""
ADDED = (
    *("ttft_mean_ms", "ttft_interval_ms", "ttft_p95_ms", "tpot_interval_ms"),
    *("bound_ttft_ms", "bound_tpot_ms", "of_bound"),
)
"""Figures that results of earlier versions lack: they read as not measured."""


def read_evaluation() -> dict[str, Any] | None:
    """Reads `benchmarks/results/evaluate.json`; None if it does not exist."""
    results = read_document("evaluate")
    if results is None:
        return None
    for row in [row for part in ("rows", "ablation", "distance") for row in results[part]]:
        if "tpot_mean_ms" not in row:
            steps_per_second = row["tokens_per_second"] * row["decode_steps"] / row["new_tokens"]
            row |= {"tpot_mean_ms": 1e3 / steps_per_second, **dict.fromkeys(ADDED)}
    results.setdefault("known", [])
    return results


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
