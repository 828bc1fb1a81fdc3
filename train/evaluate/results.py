"""What results.json holds: who is first, every cell, and what they were measured on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from collect.traces import Trace
from runtime.config import SystemConfig
from runtime.sim.hardware import Hardware
from train.evaluate.arms import Arms
from train.evaluate.cells import ABLATION, DISTANCE, TABLE, Cell
from train.evaluate.config import OURS, EvaluateConfig
from train.evaluate.sources import Source
from train.evaluate.winners import compared, tally, winners

DEFINITIONS = {
    "ttft_ms": "median time of a prefill, which asks for nearly all experts",
    "tpot_ms": "median time of a decode step, one token of each request of the batch; p95 and p99 "
    "are percentiles over the same steps",
    "tokens_per_second": "generated tokens / time of all decode steps",
    "hit_rate": "share of the experts that decode's routers asked for that were in the arena",
    "bytes_moved_per_token": "bytes over the link in decode steps, for each generated token",
    "bytes_wasted_per_token": "of the prefetched bytes, those whose expert left before a router "
    "asked for it",
    "bytes_late_per_token": "moved after the router had asked for a predicted expert",
    "stall_share": "share of decode's time in which the computation waited for an expert",
    "predictor_ms_per_token": "charged to predictions, which run beside the computation",
    "peak_bytes": "memory for experts: slots x an expert's bytes",
    "speedup_decode": "TPOT of the baseline at the same budget / TPOT",
    "speedup_prefill": "TTFT of the baseline at the same budget / TTFT",
    "share_of_bound": "TPOT of the bound (all routing of a token known at its start, Belady "
    "eviction, the same link and computation) / TPOT",
}


def results_of(
    config: EvaluateConfig,
    *,
    trace: Trace,
    machines: Sequence[Hardware],
    arms: Arms,
    sources: Mapping[str, Source],
    cells: Sequence[tuple[Cell, Mapping[str, Any]]],
    seconds: float,
) -> dict[str, Any]:
    """Plain values; each part of the cells in its own list, the distributions left out."""
    parts: dict[str, list[dict[str, Any]]] = {TABLE: [], ABLATION: [], DISTANCE: []}
    for cell, figures in cells:
        row = {key: value for key, value in figures.items() if key != "tpot_percentiles_ms"}
        parts[cell.part].append({**row, "part": cell.part, "system": cell.arm.label})
    baseline, bound = config.baseline.name, config.bound.name
    places = winners(parts[TABLE], ours=OURS, bound=bound)
    manifest = trace.manifest
    return {
        "model": trace.spec.as_dict(),
        "trace": {
            "digest": trace.digest,
            "dataset": manifest.plan.dataset,
            "source": manifest.plan.source,
            "held_out_tokens": len(trace.rows("held_out")),
        },
        "new_tokens": config.new_tokens,
        "shape": asdict(config.shape),
        "machines": [finite(asdict(one)) for one in machines],  # type: ignore[call-overload]
        "hardware": [asdict(one) for one in config.hardware],
        "systems": {arm.label: settings(arm.system) for arm in arms.table},
        "predictors": {key: source.digest for key, source in sources.items()},
        "missing": arms.missing,
        "baseline": baseline,
        "bound": bound,
        "ours": OURS,
        "ablated": config.ablated.name,
        "tally": tally(places),
        "winners": places,
        "definitions": DEFINITIONS,
        "rows": compared(parts[TABLE], baseline=baseline, bound=bound),
        "ablation": parts[ABLATION],
        "distance": parts[DISTANCE],
        "seconds": round(seconds, 3),
    }


def settings(system: SystemConfig) -> dict[str, Any]:
    """A system's settings; counts, hundreds of numbers, by what they are of."""
    told = asdict(system)
    if "counts" in told["eviction_options"]:
        told["eviction_options"]["counts"] = "of the training requests"
    return told


def finite(times: Mapping[str, Any]) -> dict[str, Any]:
    """A machine's times; null for a bandwidth that is never the bottleneck."""
    return {key: None if value == math.inf else value for key, value in times.items()}
