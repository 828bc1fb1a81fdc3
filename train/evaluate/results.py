"""Contents of results.json: which system is first, every replay, and what they were measured on."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from predictors.typed_values import read_table
from runtime.config import SystemConfig
from runtime.sim.hardware import Hardware
from runtime.tools.comparison import Variant
from runtime.tools.intervals import bootstrap_ratio
from runtime.tools.report.provenance import describe_origin
from train.config import OURS, EvaluateConfig
from train.evaluate.jobs import Row
from train.evaluate.table import PLACE, by_place, place_of
from train.evaluate.variants import KNOWN, TABLE, PredictorSources

CLOSE = 0.02
"""Slower than the first system by less than this share counts as close to it."""

DISTRIBUTIONS = ("tpot_percentiles_ms", "run_ms", "run_steps")
"""Fields of a replay that results.json leaves out."""

DEFINITIONS: Mapping[str, str] = read_table(Path(__file__).with_suffix(".yaml"))


def make_results(
    config: EvaluateConfig,
    sources: PredictorSources,
    *,
    machines: Sequence[Hardware],
    variants: Sequence[Variant],
    missing: Mapping[str, str],
    rows: Sequence[Row],
    seconds: float,
) -> dict[str, Any]:
    """Return what results.json holds; the distributions of times are left out."""
    table = [row for row in rows if row["part"] == TABLE]
    baseline = config.baseline.name
    knowing = [variant.label for variant in variants if variant.system.knows_future]
    standings = rank_systems(table, ours=OURS, left_out=knowing)
    trace = sources.trace
    return {
        "origin": describe_origin(config.run_dir),
        "model": trace.spec.as_dict(),
        "trace": {
            "digest": trace.digest,
            "dataset": trace.manifest.plan.dataset,
            "source": trace.manifest.plan.source,
            "held_out_tokens": len(trace.rows("held_out")),
        },
        "replay_tokens": config.replay_tokens,
        "shape": asdict(config.shape),
        "machines": [finite(asdict(machine)) for machine in machines],
        "hardware": [asdict(hardware) for hardware in config.hardware],
        "systems": {variant.label: settings(variant.system) for variant in variants},
        "predictors": {key: predictor.digest for key, predictor in sources.found.items()},
        "missing": missing,
        "baseline": baseline,
        "knows_future": knowing,
        "ours": OURS,
        "tally": tally(standings, ours=OURS),
        "winners": standings,
        "definitions": DEFINITIONS,
        "rows": compare_rows(table, baseline=baseline),
        "known": [shorten(row) for row in rows if row["part"] == KNOWN],
        "seconds": round(seconds, 3),
    }


def shorten(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in DISTRIBUTIONS}


def settings(system: SystemConfig) -> dict[str, Any]:
    """Return a system's settings, with a note in place of hundreds of counts."""
    values = asdict(system)
    if "counts" in values["eviction_options"]:
        values["eviction_options"]["counts"] = "of the training requests"
    return values


def finite(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return a machine's times, null for a bandwidth that is never the bottleneck."""
    return {key: None if value == math.inf else value for key, value in times.items()}


def compare_rows(rows: Sequence[Row], *, baseline: str) -> list[dict[str, Any]]:
    """Return flat rows for results.json, with the speed-ups over the baseline."""
    baselines = {place_of(row): row for row in rows if row["system"] == baseline}
    compared = []
    for row in rows:
        slow = baselines.get(place_of(row))
        ratios = {
            "speedup_decode": time_ratio(slow, row, "tpot_mean_ms"),
            "speedup_interval": slow and bootstrap_ratio(slow["run_ms"], row["run_ms"]),
            "speedup_prefill": time_ratio(slow, row, "ttft_mean_ms"),
        }
        compared.append({**shorten(row), **ratios})
    return compared


def time_ratio(other: Row | None, own: Row, key: str) -> float | None:
    """Return how many times as long the other takes, None where either was not measured."""
    times = (other and other[key]), own[key]
    return times[0] / times[1] if all(times) else None


def rank_systems(rows: Sequence[Row], *, ours: str, left_out: Collection[str]) -> list[Row]:
    """Return the fastest two systems of each condition by mean TPOT, and what is about ours.

    Systems that know the future are left out. Of ours: `rank`, from 1; `behind_first`, the share by
    which it is slower than the first or, below 0, faster than the second, with the 95 % interval
    over the same requests in pairs; None where it is not among them.
    """
    standings: list[Row] = []
    for group in by_place(rows, *PLACE).values():
        ranked = [row for row in group if row["system"] not in left_out and row["tpot_mean_ms"]]
        if not ranked:
            continue
        ranked.sort(key=lambda row: row["tpot_mean_ms"])
        first, second = ranked[0], ranked[1] if len(ranked) > 1 else {}
        standings.append(
            {
                **{key: first[key] for key in PLACE},
                "first": first["system"],
                "first_tpot_mean_ms": first["tpot_mean_ms"],
                "first_by_median": min(ranked, key=lambda row: row["tpot_ms"])["system"],
                "first_by_p95": min(ranked, key=lambda row: row["tpot_p95_ms"])["system"],
                "second": second.get("system"),
                "second_tpot_mean_ms": second.get("tpot_mean_ms"),
                "bound_tpot_ms": first["bound_tpot_ms"],
                **rank_ours(ranked, ours),
            }
        )
    return standings


OF_OURS = ("ours_tpot_mean_ms", "rank", "behind_first", "behind_interval", "close", "of_bound")


def rank_ours(ranked: Sequence[Row], ours: str) -> dict[str, Any]:
    """Return the values of a standing that are about our system."""
    names = [row["system"] for row in ranked]
    if ours not in names:
        return dict.fromkeys(OF_OURS)
    place = names.index(ours)
    own, rival = ranked[place], ranked[1 if place == 0 and len(ranked) > 1 else 0]
    behind = own["tpot_mean_ms"] / rival["tpot_mean_ms"] - 1
    interval = bootstrap_ratio(own["run_ms"], rival["run_ms"])
    margin = None if interval is None else (interval[0] - 1, interval[1] - 1)
    close = place == 0 or behind <= CLOSE
    values = own["tpot_mean_ms"], place + 1, behind, margin, close, own["of_bound"]
    return dict(zip(OF_OURS, values, strict=True))


def tally(standings: Sequence[Row], *, ours: str) -> Row:
    """Count the conditions in which our system is first, clearly so, or close to it.

    Clearly: the interval of the margin excludes 0. Its worst figures are added.
    """
    ranked = [standing for standing in standings if standing["rank"] is not None]
    first = [standing for standing in ranked if standing["rank"] == 1]
    shares = [standing["of_bound"] for standing in ranked if standing["of_bound"] is not None]
    margins = [standing["behind_interval"] for standing in first]
    return {
        "cells": len(ranked),
        "first": len(first),
        "clearly_first": sum(margin is not None and margin[1] < 0 for margin in margins),
        "first_by_median": sum(standing["first_by_median"] == ours for standing in ranked),
        "first_by_p95": sum(standing["first_by_p95"] == ours for standing in ranked),
        "close": sum(standing["close"] for standing in ranked),
        "worst_behind_first": max((one["behind_first"] for one in ranked), default=None),
        "worst_of_bound": min(shares, default=None),
    }
