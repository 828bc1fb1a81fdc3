"""From runs to rows: medians over the repetitions, ratios within a repetition."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime.systems import ON_DEMAND
from runtime.tools.bench.rounds import Outcome, Run
from runtime.tools.comparison import Condition


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each case, in the order of the cases."""
    baselines = {
        outcome.case.condition: outcome.runs
        for outcome in outcomes
        if outcome.case.variant.label == ON_DEMAND
    }
    return [row_of(outcome, baselines) for outcome in outcomes]


def row_of(outcome: Outcome, baselines: dict[Condition, list[Run]]) -> dict[str, Any]:
    """One case's figures: times in seconds, sizes in bytes, shares of 1; or why there are none."""
    case, runs = outcome.case, outcome.runs
    row: dict[str, Any] = {
        "budget": case.condition.budget,
        "batch": case.condition.batch,
        "system": case.variant.label,
        "simulated": False,
    }
    if outcome.failed is not None or not runs:
        return {**row, "failed": outcome.failed}
    steps = [seconds for run in runs for seconds in run["tpot_seconds"]]
    per_run: dict[str, Callable[[Run], float | None]] = {
        "ttft_seconds": lambda run: statistics.median(run["ttft_seconds"]),
        "tpot_seconds": tpot,
        "tokens_per_second": lambda run: num_tokens(run) / run["wall_seconds"],
        "decode_hit_rate": lambda run: ratio(run["decode"]["hits"], run["decode"]["requests"]),
        "prefill_hit_rate": lambda run: ratio(run["prefill"]["hits"], run["prefill"]["requests"]),
        "decode_stall_share": lambda run: share(run, "stall_seconds"),
        "decode_predictor_share": lambda run: share(run, "predictor_seconds"),
        "decode_link_share": lambda run: share(run, "link_seconds"),
        "bytes_moved": lambda run: both(run, "bytes_moved"),
        "bytes_wasted": lambda run: both(run, "bytes_wasted"),
        "bytes_late": lambda run: both(run, "bytes_late"),
        "bytes_moved_per_decode_step": lambda run: (
            run["decode"]["bytes_moved"] / len(run["tpot_seconds"])
        ),
        "read_bytes_per_second": lambda run: ratio(
            both(run, "bytes_moved"), both(run, "link_seconds")
        ),
        "peak_memory_bytes": lambda run: run["peak_memory_bytes"],
        "memory_beside_bytes": lambda run: (
            run["peak_memory_bytes"] - run["weights_bytes"] - run["arena_bytes"]
        ),
        "left_in_page_cache": lambda run: run["left_in_page_cache"],
    }
    row |= {name: middle([figure(run) for run in runs]) for name, figure in per_run.items()}
    pairs = list(zip(runs, baselines.get(case.condition, []), strict=False))
    first = runs[0]
    return {
        **row,
        "tpot_p95_seconds": float(np.percentile(steps, 95)),
        "tpot_p99_seconds": float(np.percentile(steps, 99)),
        "tpot_of_runs": [tpot(run) for run in runs],
        "tpot_speed_up": middle([tpot(base) / tpot(run) for run, base in pairs]),
        "ttft_speed_up": middle(
            [
                statistics.median(base["ttft_seconds"]) / statistics.median(run["ttft_seconds"])
                for run, base in pairs
            ]
        ),
        "predictor": first["predictor"],
        "reuse_predictor": first["reuse_predictor"],
        "note": first["note"],
        "adaptive_prefetch": runs[-1]["adaptive_prefetch"],
        "arena_bytes": first["arena_bytes"],
        "arena_slots": first["arena_slots"],
        "weights_bytes": first["weights_bytes"],
        "steps": steps,
    }


def tpot(run: Run) -> float:
    """Median time of a run's decode steps."""
    return statistics.median(run["tpot_seconds"])


def num_tokens(run: Run) -> int:
    """New tokens of the measured requests, which are the last of them."""
    measured = run["tokens"][-len(run["ttft_seconds"]) :]
    return sum(len(row) for request in measured for row in request)


def both(run: Run, key: str) -> float:
    """Of the measured prefills and decode steps together."""
    return run["prefill"][key] + run["decode"][key]


def share(run: Run, key: str) -> float:
    """Of the decode steps' time."""
    return run["decode"][key] / sum(run["tpot_seconds"])


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def middle(values: Sequence[float | None]) -> float | None:
    """Median of what there is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def bound_rows(found: list[dict[str, Any]], live: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Simulated rows beside the live ones: the same columns where they mean something."""
    on_demand = {
        (row["budget"], row["batch"]): row
        for row in live
        if row["system"] == ON_DEMAND and not row.get("failed")
    }
    rows = []
    for one in found:
        row = {"simulated": True, "decode_hit_rate": one.get("hit_rate"), **one}
        row.pop("hit_rate", None)
        base = on_demand.get((one["budget"], one["batch"]))
        if base is not None and not one.get("failed"):
            row["tpot_speed_up"] = base["tpot_seconds"] / one["tpot_seconds"]
            row["ttft_speed_up"] = base["ttft_seconds"] / one["ttft_seconds"]
        rows.append(row)
    return rows
