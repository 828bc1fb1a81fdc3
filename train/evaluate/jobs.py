"""Replays of many cases that share steps and forecasts, and the figures of each."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from collect.traces import Trace
from predictors.spec import ModelSpec
from runtime.policy.counters import sum_counters
from runtime.sim.lower_bound import TimeBound, bound_time
from runtime.sim.replay import ReplayStats, rare_collections, replay
from runtime.sim.step import ArrayStep, RecordedStep
from runtime.tools.comparison import Variant
from runtime.tools.intervals import bootstrap_ratio
from train.evaluate.forecasts import (
    RecordedForecasts,
    held_out_steps,
    record_forecasts,
    routing_only,
)
from train.evaluate.variants import FoundPredictor, ReplayCase
from train.replay import budget_slots, is_decode
from train.resumable import OnFinished

PERCENTS = range(101)
"""Percentiles of the decode times that are kept of each replay."""

CODE = (
    "predictors",
    "runtime/policy",
    "runtime/sim",
    "runtime/transfer/loop.py",
    "train/evaluate/forecasts.py",
    "train/evaluate/jobs.py",
    "runtime/tools/intervals.py",
)
"""Sources on which the figures of a replay depend."""


Row = Mapping[str, Any]
"""Figures of one replay, as `measure_replay` returns them, or a row of results.json."""


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """Cases with the same steps and forecasts, which are made once for all of them."""

    trace: Path
    new_tokens: int
    predictors: Mapping[str, FoundPredictor] = field(repr=False)
    """By key."""
    cases: list[tuple[str, ReplayCase]] = field(repr=False)
    """With the digest of each; at least one."""

    @property
    def digests(self) -> Sequence[str]:
        return [digest for digest, _ in self.cases]

    @property
    def cost(self) -> float:
        return len(self.cases) * (1 + 1 / self.cases[0][1].condition.batch)

    @rare_collections()
    def run(self, on_finished: OnFinished) -> None:
        """Replay each case and call `on_finished` with its digest and figures."""
        # The command has verified the trace; hashing it again in each worker would take longer.
        trace = Trace.open(self.trace, verify=False)
        spec = trace.spec
        shared = self.cases[0][1]
        batch = shared.condition.batch
        steps = held_out_steps(trace, batch=batch, new_tokens=self.new_tokens)
        routed = [routing_only(step, spec.num_layers) for step in steps]
        recorded = record_all(shared.variant, steps, self.predictors, spec)
        bounds: dict[tuple[str, str], TimeBound] = {}
        for digest, case in self.cases:
            stats = replay_case(case, routed, recorded, spec)
            place = case.hardware.name, case.condition.budget
            if place not in bounds:
                slots = budget_slots(case.condition.budget, spec, case.hardware)
                bounds[place] = bound_time(
                    routed, spec=spec, hardware=case.hardware, num_slots=slots
                )
            on_finished(digest, measure_replay(stats, case, routed, spec, bounds[place]))


def record_all(
    variant: Variant,
    steps: Sequence[RecordedStep],
    predictors: Mapping[str, FoundPredictor],
    spec: ModelSpec,
) -> dict[str, RecordedForecasts]:
    """Return the variant's forecasts for these steps by key."""
    return {
        key: record_forecasts(predictors[key].load(spec), steps)
        for key in variant.forecasts
        if key is not None
    }


def replay_case(
    case: ReplayCase,
    steps: Sequence[ArrayStep],
    recorded: Mapping[str, RecordedForecasts],
    spec: ModelSpec,
) -> ReplayStats:
    """Replay the steps with one system, from empty arenas."""
    variant = case.variant
    predictor, reuse_predictor = (
        None if key is None else recorded[key].predictor(spec) for key in variant.forecasts
    )
    return replay(
        steps,
        predictor,
        spec=spec,
        system=variant.system,
        hardware=case.hardware,
        budget_slots=budget_slots(case.condition.budget, spec, case.hardware),
        reuse_predictor=reuse_predictor,
    )


def measure_replay(
    stats: ReplayStats,
    case: ReplayCase,
    steps: Sequence[ArrayStep],
    spec: ModelSpec,
    bound: TimeBound,
) -> Row:
    """Return the figures of one replay, as plain JSON values; None: not measured.

    Times are in milliseconds and bytes per generated token; counters are those of decode steps
    unless named otherwise. `results.DEFINITIONS` has the meanings. Further: `bound_ttft_ms`, the
    least mean of the prefills' times on this machine (`runtime.sim.lower_bound`); `run_ms` and
    `run_steps`, time and length of each run of decode steps between two prefills: one request's,
    at batch 1.
    """
    decode = sum_counters(stats.decode)
    decoding = sum(stats.tpot_seconds)
    # The bound copies every miss: computing some of them in host memory may be faster.
    is_bounded = not case.variant.system.hybrid
    if is_bounded:
        bound.assert_holds(stats)
    tokens = sum(len(step.tokens_T) for step in steps if is_decode(step))
    variant, condition = case.variant, case.condition
    slots = budget_slots(condition.budget, spec, case.hardware)
    run_ms = [1e3 * sum(run) for run in stats.decode_runs]
    run_steps = [len(run) for run in stats.decode_runs]
    ttft_ms = [1e3 * seconds for seconds in stats.ttft_seconds]
    return {
        "part": case.part,
        "system": variant.label,
        "hardware": case.hardware.name,
        "budget": condition.budget,
        "batch": condition.batch,
        "predictor": variant.predictor,
        "ttft_mean_ms": sum(ttft_ms) / len(ttft_ms) if ttft_ms else None,
        "ttft_interval_ms": bootstrap_ratio(ttft_ms, [1] * len(ttft_ms)),
        "ttft_ms": percentile_ms(stats.ttft_seconds, 50),
        "ttft_p95_ms": percentile_ms(stats.ttft_seconds, 95),
        "tpot_mean_ms": 1e3 * decoding / len(stats.tpot_seconds),
        "tpot_interval_ms": bootstrap_ratio(run_ms, run_steps),
        "tpot_ms": percentile_ms(stats.tpot_seconds, 50),
        "tpot_p95_ms": percentile_ms(stats.tpot_seconds, 95),
        "tpot_p99_ms": percentile_ms(stats.tpot_seconds, 99),
        "tokens_per_second": tokens / decoding,
        "bound_ttft_ms": milliseconds(bound.ttft_seconds) if is_bounded else None,
        "bound_tpot_ms": milliseconds(bound.tpot_seconds) if is_bounded else None,
        "of_bound": bound.decode_seconds / decoding if is_bounded else None,
        "hit_rate": decode.hit_rate,
        "fetch_rate": decode.fetch_rate,
        "promoe_good_pred": decode.promoe_good_pred,
        "bytes_moved_per_token": decode.bytes_moved / tokens,
        "bytes_wasted_per_token": decode.bytes_wasted / tokens,
        "bytes_late_per_token": decode.bytes_late / tokens,
        "stall_share": stats.decode_stall_seconds / decoding,
        "stall_share_all": stats.stall_share,
        "predictor_ms_per_token": 1e3 * stats.decode_predictor_seconds / tokens,
        "peak_bytes": slots * sum(case.hardware.chunk_bytes),
        "slots": slots,
        "new_tokens": tokens,
        "decode_steps": len(stats.tpot_seconds),
        "prefills": len(stats.ttft_seconds),
        # The distribution for its plot, rounded because every replay keeps it.
        "tpot_percentiles_ms": [
            round(1e3 * float(value), 4) for value in np.percentile(stats.tpot_seconds, PERCENTS)
        ],
        "run_ms": run_ms,
        "run_steps": run_steps,
    }


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else None


def code_digest(places: Sequence[str] = CODE) -> str:
    """Return the sha256 of the sources that replays run: other code replays again."""
    root = Path(__file__).resolve().parents[2]
    whole = hashlib.sha256()
    for place in map(root.joinpath, places):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            whole.update(path.read_bytes())
    return whole.hexdigest()
