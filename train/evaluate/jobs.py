"""Replays of many cases that share steps and forecasts, and the figures of each."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from collect.traces import Trace
from predictors.spec import ModelSpec
from runtime.policy.counters import sum_counters
from runtime.sim.lower_bound import TimeBound, bound_time
from runtime.sim.replay import ReplayStats, rare_collections, replay
from runtime.sim.step import ArrayStep, RecordedStep
from runtime.tools.comparison import Variant
from runtime.tools.intervals import Interval, bootstrap_ratio
from train.evaluate.forecasts import (
    RecordedForecasts,
    held_out_steps,
    record_forecasts,
    routing_only,
)
from train.evaluate.sources import FoundPredictor
from train.evaluate.variants import ReplayCase
from train.replay import budget_slots, is_decode
from train.resumable import OnFinished

CDF_POINTS = 101
"""Percentiles of the decode times that are kept of each replay, 0 to 100."""

CODE = (
    "predictors",
    "runtime/policy",
    "runtime/sim",
    "train/evaluate/forecasts.py",
    "train/evaluate/jobs.py",
    "runtime/tools/intervals.py",
)
"""Sources on which the figures of a replay depend."""


@dataclass(frozen=True, kw_only=True)
class ReplayRow:
    """Figures of one replay.

    Times are in milliseconds and bytes per generated token; counters are those of decode steps
    unless named otherwise. None: not measured.
    """

    part: str
    system: str
    hardware: str
    budget: str
    batch: int
    predictor: str | None
    ttft_mean_ms: float | None
    ttft_interval_ms: Interval | None
    """95 % interval of the mean, over requests."""
    ttft_ms: float | None
    """Median."""
    ttft_p95_ms: float | None
    tpot_mean_ms: float | None
    tpot_interval_ms: Interval | None
    """95 % interval of the mean, over runs of decode steps between two prefills."""
    tpot_ms: float | None
    """Median."""
    tpot_p95_ms: float | None
    tpot_p99_ms: float | None
    tokens_per_second: float
    bound_ttft_ms: float | None
    """The least mean of the prefills' times on this machine (`runtime.sim.lower_bound`)."""
    bound_tpot_ms: float | None
    of_bound: float | None
    """Bound of the mean TPOT / mean TPOT."""
    hit_rate: float | None
    fetch_rate: float | None
    joint_rate: float | None
    bytes_moved_per_token: float
    bytes_wasted_per_token: float
    bytes_late_per_token: float
    stall_share: float
    stall_share_all: float
    predictor_ms_per_token: float
    peak_bytes: int
    slots: int
    new_tokens: int
    decode_steps: int
    prefills: int
    tpot_percentiles_ms: list[float]
    run_ms: list[float]
    """Time of each run of decode steps between two prefills: one request's, at batch 1."""
    run_steps: list[int]


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """Cases with the same steps and forecasts, which are made once for all of them."""

    trace: Path
    spec: ModelSpec
    new_tokens: int
    predictors: Mapping[str, FoundPredictor] = field(repr=False)
    """By key."""
    cases: Sequence[tuple[str, ReplayCase]] = field(repr=False)
    """With the digest of each; at least one."""

    @property
    def digests(self) -> Sequence[str]:
        return [digest for digest, _ in self.cases]

    @property
    def cost(self) -> float:
        return len(self.cases) * (1 + 1 / self.cases[0][1].condition.batch)

    def run(self, on_finished: OnFinished) -> None:
        """Replay each case and call `on_finished` with its digest and figures."""
        with rare_collections():
            self._run(on_finished)

    def _run(self, on_finished: OnFinished) -> None:
        # The command has verified the trace; hashing it again in each worker would take longer.
        trace = Trace.open(self.trace, verify=False)
        shared = self.cases[0][1]
        batch = shared.condition.batch
        steps = held_out_steps(trace, batch=batch, new_tokens=self.new_tokens)
        routed = [routing_only(step, self.spec.num_layers) for step in steps]
        recorded = record_all(shared.variant, steps, self.predictors, self.spec)
        bounds: dict[tuple[str, str], TimeBound] = {}
        for digest, case in self.cases:
            stats = replay_case(case, routed, recorded, self.spec)
            place = case.hardware.name, case.condition.budget
            if place not in bounds:
                slots = budget_slots(case.condition.budget, self.spec, case.hardware)
                bounds[place] = bound_time(
                    routed, spec=self.spec, hardware=case.hardware, num_slots=slots
                )
            row = measure_replay(stats, case, routed, self.spec, bounds[place])
            on_finished(digest, asdict(row))


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
) -> ReplayRow:
    decode = sum_counters(stats.decode)
    decoding = sum(stats.tpot_seconds)
    # The bound copies every miss: computing some of them in host memory may be faster.
    is_bounded = not case.variant.system.hybrid
    if is_bounded:
        bound.assert_holds(stats)
    tokens = sum(len(step.tokens_T) for step in steps if is_decode(step))
    seconds = decoding + sum(stats.ttft_seconds)
    variant, condition = case.variant, case.condition
    slots = budget_slots(condition.budget, spec, case.hardware)
    run_ms = [1e3 * sum(run) for run in stats.decode_runs]
    run_steps = [len(run) for run in stats.decode_runs]
    ttft_ms = [1e3 * seconds for seconds in stats.ttft_seconds]
    return ReplayRow(
        part=case.part,
        system=variant.label,
        hardware=case.hardware.name,
        budget=condition.budget,
        batch=condition.batch,
        predictor=variant.predictor,
        ttft_mean_ms=mean(ttft_ms),
        ttft_interval_ms=bootstrap_ratio(ttft_ms, [1] * len(ttft_ms)),
        ttft_ms=percentile_ms(stats.ttft_seconds, 50),
        ttft_p95_ms=percentile_ms(stats.ttft_seconds, 95),
        tpot_mean_ms=1e3 * decoding / len(stats.tpot_seconds),
        tpot_interval_ms=bootstrap_ratio(run_ms, run_steps),
        tpot_ms=percentile_ms(stats.tpot_seconds, 50),
        tpot_p95_ms=percentile_ms(stats.tpot_seconds, 95),
        tpot_p99_ms=percentile_ms(stats.tpot_seconds, 99),
        tokens_per_second=tokens / decoding,
        bound_ttft_ms=milliseconds(bound.ttft_seconds) if is_bounded else None,
        bound_tpot_ms=milliseconds(bound.tpot_seconds) if is_bounded else None,
        of_bound=bound.decode_seconds / decoding if is_bounded else None,
        hit_rate=decode.hit_rate,
        fetch_rate=decode.fetch_rate,
        joint_rate=decode.joint_rate,
        bytes_moved_per_token=decode.bytes_moved / tokens,
        bytes_wasted_per_token=decode.bytes_wasted / tokens,
        bytes_late_per_token=decode.bytes_late / tokens,
        stall_share=stats.decode_stall_seconds / decoding,
        stall_share_all=stats.stall_seconds / seconds,
        predictor_ms_per_token=1e3 * stats.decode_predictor_seconds / tokens,
        peak_bytes=slots * sum(case.hardware.chunk_bytes),
        slots=slots,
        new_tokens=tokens,
        decode_steps=len(stats.tpot_seconds),
        prefills=len(stats.ttft_seconds),
        tpot_percentiles_ms=percentiles_ms(stats.tpot_seconds),
        run_ms=run_ms,
        run_steps=run_steps,
    )


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else None


def percentiles_ms(seconds: Sequence[float]) -> list[float]:
    """Return the distribution for its plot, rounded because every replay keeps it."""
    shares = np.linspace(0, 100, CDF_POINTS)
    return [round(1e3 * float(value), 4) for value in np.percentile(seconds, shares)]


def code_digest(places: Sequence[str] = CODE) -> str:
    """Return the sha256 of the sources that replays run: other code replays again."""
    root = Path(__file__).resolve().parents[2]
    whole = hashlib.sha256()
    for place in map(root.joinpath, places):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            whole.update(path.read_bytes())
    return whole.hexdigest()
