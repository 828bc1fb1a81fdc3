"""Replays the cells that share their steps and forecasts, and turns each replay into figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from collect.traces import Trace
from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.config import ORACLE
from runtime.policy.counters import sum_counters
from runtime.sim.replay import ReplayStats, replay
from runtime.sim.step import RecordedStep
from train.evaluate.cells import TRUTH, Cell
from train.evaluate.forecasts import RecordedForecasts, perfect_forecasts, record_forecasts
from train.evaluate.sources import Source
from train.evaluate.steps import Routed, held_out_steps, is_decode, routed
from train.replay import budget_slots

CDF_POINTS = 101
"""Percentiles of the times of a token that are kept of each cell, 0 to 100."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Cells with the same steps and forecasts, which are made once for all of them."""

    trace: Path
    spec: ModelSpec
    batch: int
    new_tokens: int
    predictor: str | None
    reuse_predictor: str | None
    sources: Mapping[str, Source] = field(repr=False)
    """Those of the two that are not the routing itself, by their key."""
    cells: Sequence[tuple[str, Cell]] = field(repr=False)
    """With the digest of each."""


def run_job(job: Job, done: Callable[[str, dict[str, Any]], None]) -> None:
    """Replays each cell of the job; `done` is told its digest and figures."""
    # Whole when the command opened it; hashing it again in each worker would take longer.
    trace = Trace.open(job.trace, verify=False)
    steps = held_out_steps(trace, batch=job.batch, new_tokens=job.new_tokens)
    light = [routed(step, job.spec.num_layers) for step in steps]
    recorded = record_all(job, steps)
    for digest, cell in job.cells:
        done(digest, replayed(cell, light, recorded, job.spec))


def record_all(job: Job, steps: Sequence[RecordedStep]) -> dict[str, RecordedForecasts]:
    """What the job's cells are played, by key.

    The bound is no predictor: a replay of a system that names the oracle sees to it.
    """
    keys = [
        key for key in (job.predictor, job.reuse_predictor) if key is not None and key != ORACLE
    ]
    return {key: forecasts_of(key, job, steps) for key in keys}


def forecasts_of(key: str, job: Job, steps: Sequence[RecordedStep]) -> RecordedForecasts:
    """The forecasts of one predictor for these steps."""
    if key == TRUTH:
        return perfect_forecasts(steps, job.spec)
    return record_forecasts(job.sources[key].make(job.spec), steps)


def replayed(
    cell: Cell, steps: Sequence[Routed], recorded: Mapping[str, RecordedForecasts], spec: ModelSpec
) -> dict[str, Any]:
    """One cell's figures."""
    slots = budget_slots(cell.budget, spec, cell.hardware)
    stats = replay(
        steps,
        predictor_of(cell, recorded, spec),
        spec=spec,
        system=cell.arm.system,
        hardware=cell.hardware,
        budget_slots=slots,
        reuse_predictor=None
        if cell.arm.reuse_predictor is None
        else recorded[cell.arm.reuse_predictor].predictor(spec),
    )
    return figures(stats, cell, steps, slots)


def predictor_of(
    cell: Cell, recorded: Mapping[str, RecordedForecasts], spec: ModelSpec
) -> Predictor | None:
    """What the cell's system is played, from the beginning; the bound asks nobody."""
    if cell.arm.predictor is None or cell.arm.predictor == ORACLE:
        return None
    tape = recorded[cell.arm.predictor]
    if cell.arm.distance is not None:
        tape = tape.at_distance(cell.arm.distance)
    return tape.predictor(spec)


def figures(stats: ReplayStats, cell: Cell, steps: Sequence[Routed], slots: int) -> dict[str, Any]:
    """Times in milliseconds, bytes for each generated token, counters of decode steps unless named
    otherwise; null where nothing was measured.
    """
    decode = sum_counters(stats.decode)
    decoding = sum(stats.tpot_seconds)
    tokens = sum(len(step.tokens_T) for step in steps if is_decode(step))
    seconds = decoding + sum(stats.ttft_seconds)
    return {
        "part": cell.part,
        "system": cell.arm.label,
        "hardware": cell.hardware.name,
        "budget": cell.budget,
        "batch": cell.batch,
        "predictor": cell.arm.predictor,
        "distance": cell.arm.distance,
        "ttft_ms": median_ms(stats.ttft_seconds),
        "tpot_ms": median_ms(stats.tpot_seconds),
        "tpot_p95_ms": percentile_ms(stats.tpot_seconds, 95),
        "tpot_p99_ms": percentile_ms(stats.tpot_seconds, 99),
        "tokens_per_second": tokens / decoding,
        "hit_rate": decode.hit_rate,
        "fetch_rate": decode.fetch_rate,
        "joint_rate": decode.joint_rate,
        "bytes_moved_per_token": decode.bytes_moved / tokens,
        "bytes_wasted_per_token": decode.bytes_wasted / tokens,
        "bytes_late_per_token": decode.bytes_late / tokens,
        "stall_share": stats.decode_stall_seconds / decoding,
        "stall_share_all": stats.stall_seconds / seconds,
        "predictor_ms_per_token": 1e3 * stats.decode_predictor_seconds / tokens,
        "peak_bytes": slots * sum(cell.hardware.chunk_bytes),
        "slots": slots,
        "new_tokens": tokens,
        "decode_steps": len(stats.tpot_seconds),
        "prefills": len(stats.ttft_seconds),
        "tpot_percentiles_ms": percentiles_ms(stats.tpot_seconds),
    }


def median_ms(seconds: Sequence[float]) -> float | None:
    return percentile_ms(seconds, 50)


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else None


def percentiles_ms(seconds: Sequence[float]) -> list[float]:
    """The distribution, for its plot; rounded, for it is kept of every cell."""
    shares = np.linspace(0, 100, CDF_POINTS)
    return [round(1e3 * float(one), 4) for one in np.percentile(seconds, shares)]
