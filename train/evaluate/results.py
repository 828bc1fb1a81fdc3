"""Contents of results.json: which system is first, every replay, and what they were measured on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from collect.traces import Trace
from runtime.config import SystemConfig
from runtime.sim.hardware import Hardware
from train.evaluate.config import OURS, EvaluateConfig
from train.evaluate.jobs import ReplayRow
from train.evaluate.sources import StoredPredictor
from train.evaluate.variants import ABLATION, DISTANCE, TABLE, Variants

CLOSE = 0.02
"""Slower than the first system by less than this share counts as close to it."""

Place = tuple[str, str, int]
"""Hardware, budget and batch size: systems are compared within one of them."""

DEFINITIONS = {
    "ttft_ms": "median time of a prefill, which needs nearly all experts",
    "tpot_ms": "median time of a decode step, one token of each request of the batch; p95 and p99 "
    "are percentiles over the same steps",
    "tokens_per_second": "generated tokens / time of all decode steps",
    "share_of_least_time": "a time of decode that no system can beat / its time: in each window "
    "of steps, the transfers that Belady needs with all routing known, or the computation",
    "hit_rate": "share of the experts requested by decode's routers that were in the arena",
    "bytes_moved_per_token": "bytes over the link in decode steps, for each generated token",
    "bytes_wasted_per_token": "of the prefetched bytes, those whose expert was evicted before a "
    "router requested it",
    "bytes_late_per_token": "moved after the router had requested a predicted expert",
    "stall_share": "share of decode's time in which the computation waited for an expert",
    "predictor_ms_per_token": "charged to predictions, which run in parallel to the computation",
    "peak_bytes": "memory for experts: slots x an expert's bytes",
    "speedup_decode": "TPOT of the baseline at the same budget / TPOT",
    "speedup_prefill": "TTFT of the baseline at the same budget / TTFT",
    "share_of_bound": "TPOT of the bound (all routing of a token known at its start, Belady "
    "eviction, the same link and computation) / TPOT",
}


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """A replay with its times relative to the baseline and the bound of the same condition."""

    row: ReplayRow
    speedup_decode: float | None
    speedup_prefill: float | None
    share_of_bound: float | None
    """Above 1, the system is faster than the bound."""

    def as_dict(self) -> dict[str, Any]:
        """Return one flat row for results.json."""
        ratios = asdict(self)
        del ratios["row"]
        return {**row_dict(self.row), **ratios}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The fastest two systems of a condition, the bound left out, and the rank of ours."""

    hardware: str
    budget: str
    batch: int
    first: str
    first_tpot_ms: float
    second: str | None
    second_tpot_ms: float | None
    bound_tpot_ms: float | None
    ours_tpot_ms: float | None = None
    rank: int | None = None
    """From 1; None: our system is not among them."""
    behind_first: float | None = None
    """Share by which ours is slower than the first, or, below 0, faster than the second."""
    close: bool | None = None
    share_of_bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Number of conditions in which our system is first or close to it, and its worst figures."""

    cells: int
    first: int
    close: int
    worst_behind_first: float | None
    worst_share_of_bound: float | None


def make_results(
    config: EvaluateConfig,
    *,
    trace: Trace,
    machines: Sequence[Hardware],
    variants: Variants,
    predictors: Mapping[str, StoredPredictor],
    rows: Sequence[ReplayRow],
    seconds: float,
) -> dict[str, Any]:
    """Return what results.json holds; the distributions of times are left out."""
    parts = {
        part: [row for row in rows if row.part == part] for part in (TABLE, ABLATION, DISTANCE)
    }
    baseline, bound = config.baseline.name, config.bound.name
    standings = rank_systems(parts[TABLE], ours=OURS, bound=bound)
    compared = compare_rows(parts[TABLE], baseline=baseline, bound=bound)
    manifest = trace.manifest
    return {
        "model": trace.spec.as_dict(),
        "trace": {
            "digest": trace.digest,
            "dataset": manifest.plan.dataset,
            "source": manifest.plan.source,
            "held_out_tokens": len(trace.rows("held_out")),
        },
        "new_tokens": config.replay_tokens,
        "shape": asdict(config.shape),
        "machines": [finite(asdict(machine)) for machine in machines],
        "hardware": [asdict(hardware) for hardware in config.hardware],
        "systems": {variant.label: settings(variant.system) for variant in variants.table},
        "predictors": {key: predictor.digest for key, predictor in predictors.items()},
        "missing": variants.missing,
        "baseline": baseline,
        "bound": bound,
        "ours": OURS,
        "ablated": config.ablated.name,
        "tally": asdict(tally(standings)),
        "winners": [asdict(standing) for standing in standings],
        "definitions": DEFINITIONS,
        "rows": [row.as_dict() for row in compared],
        "ablation": [row_dict(row) for row in parts[ABLATION]],
        "distance": [row_dict(row) for row in parts[DISTANCE]],
        "seconds": round(seconds, 3),
    }


def row_dict(row: ReplayRow) -> dict[str, Any]:
    figures = asdict(row)
    del figures["tpot_percentiles_ms"]
    return figures


def settings(system: SystemConfig) -> dict[str, Any]:
    """Return a system's settings, with a note in place of hundreds of counts."""
    values = asdict(system)
    if "counts" in values["eviction_options"]:
        values["eviction_options"]["counts"] = "of the training requests"
    return values


def finite(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return a machine's times, null for a bandwidth that is never the bottleneck."""
    return {key: None if value == math.inf else value for key, value in times.items()}


def group_rows(rows: Sequence[ReplayRow]) -> dict[Place, dict[str, ReplayRow]]:
    """Return rows by place, then by system, in their order."""
    groups: dict[Place, dict[str, ReplayRow]] = {}
    for row in rows:
        groups.setdefault((row.hardware, row.budget, row.batch), {})[row.system] = row
    return groups


def compare_rows(rows: Sequence[ReplayRow], *, baseline: str, bound: str) -> list[ComparedRow]:
    """Return each row with its speed-ups over the baseline and its share of the bound."""
    groups = group_rows(rows)
    compared = []
    for row in rows:
        group = groups[row.hardware, row.budget, row.batch]
        slow, fast = group.get(baseline), group.get(bound)
        compared.append(
            ComparedRow(
                row=row,
                speedup_decode=time_ratio(slow, row, "tpot_ms"),
                speedup_prefill=time_ratio(slow, row, "ttft_ms"),
                share_of_bound=time_ratio(fast, row, "tpot_ms"),
            )
        )
    return compared


def time_ratio(other: ReplayRow | None, own: ReplayRow, key: str) -> float | None:
    """Return how many times as long the other takes, None where either was not measured."""
    times = (other and getattr(other, key)), getattr(own, key)
    return times[0] / times[1] if all(times) else None


def rank_systems(rows: Sequence[ReplayRow], *, ours: str, bound: str) -> list[Standing]:
    """Rank the systems of each condition by the median time of a token, the bound left out."""
    standings = []
    for (hardware, budget, batch), group in group_rows(rows).items():
        times = {name: row.tpot_ms for name, row in group.items() if name != bound and row.tpot_ms}
        order = sorted(times, key=times.__getitem__)
        if not order:
            continue
        second = order[1] if len(order) > 1 else None
        limit = group[bound].tpot_ms if bound in group else None
        standings.append(
            Standing(
                hardware=hardware,
                budget=budget,
                batch=batch,
                first=order[0],
                first_tpot_ms=times[order[0]],
                second=second,
                second_tpot_ms=None if second is None else times[second],
                bound_tpot_ms=limit,
                **rank_ours(times, order, ours, limit),
            )
        )
    return standings


def rank_ours(
    times: Mapping[str, float], order: Sequence[str], ours: str, limit: float | None
) -> dict[str, Any]:
    """Return the fields of `Standing` that are about our system; none where it is missing."""
    if ours not in times:
        return {}
    mine, rank = times[ours], order.index(ours) + 1
    rival = times[order[1]] if rank == 1 and len(order) > 1 else times[order[0]]
    behind = mine / rival - 1
    return {
        "ours_tpot_ms": mine,
        "rank": rank,
        "behind_first": behind,
        "close": rank == 1 or behind <= CLOSE,
        "share_of_bound": None if limit is None else limit / mine,
    }


def tally(standings: Sequence[Standing]) -> Tally:
    """Count the conditions in which our system is first or close to it."""
    ranked = [standing for standing in standings if standing.rank is not None]
    behind = [standing.behind_first for standing in ranked if standing.behind_first is not None]
    shares = [standing.share_of_bound for standing in ranked if standing.share_of_bound is not None]
    return Tally(
        cells=len(ranked),
        first=sum(standing.rank == 1 for standing in ranked),
        close=sum(bool(standing.close) for standing in ranked),
        worst_behind_first=max(behind, default=None),
        worst_share_of_bound=min(shares, default=None),
    )
