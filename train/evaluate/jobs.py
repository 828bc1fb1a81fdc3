"""Replays of many cases over several processes; each finished replay is a file to resume from."""

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from collect.traces import Trace
from predictors.base import Predictor
from predictors.files import write_atomic
from predictors.spec import ModelSpec
from runtime.config import ORACLE
from runtime.policy.counters import sum_counters
from runtime.sim.lower_bound import TimeBound, bound_time
from runtime.sim.replay import ReplayStats, replay
from runtime.sim.simulator import Observer
from runtime.sim.step import RecordedStep
from runtime.tools.comparison import Variant
from train.evaluate.forecasts import (
    RecordedForecasts,
    RoutedStep,
    held_out_steps,
    perfect_forecasts,
    record_forecasts,
    routing_only,
)
from train.evaluate.sources import StoredPredictor
from train.evaluate.variants import TRUTH, ReplayCase
from train.replay import budget_slots, is_decode

CDF_POINTS = 101
"""Percentiles of the decode times that are kept of each replay, 0 to 100."""

CODE = (
    "predictors",
    "runtime/policy",
    "runtime/sim",
    "train/evaluate/forecasts.py",
    "train/evaluate/jobs.py",
)
"""Sources on which the figures of a replay depend."""

ROUNDING = 1e-9
"""Relative error of sums of times, by which a replay may seem to beat the least time."""

POLL_SECONDS = 0.5
"""Interval at which the progress bar counts finished replays."""


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
    distance: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    tpot_p95_ms: float | None
    tpot_p99_ms: float | None
    tokens_per_second: float
    share_of_least_time: float
    """Least time of the decode steps on this machine / their time (`runtime.sim.lower_bound`)."""
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


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """Cases with the same steps and forecasts, which are made once for all of them."""

    trace: Path
    spec: ModelSpec
    batch: int
    new_tokens: int
    predictor: str | None
    reuse_predictor: str | None
    predictors: Mapping[str, StoredPredictor] = field(repr=False)
    """By key, without the perfect forecasts."""
    cases: Sequence[tuple[str, ReplayCase]] = field(repr=False, default=())
    """With the digest of each."""

    def steps(self, trace: Trace) -> list[RecordedStep]:
        return held_out_steps(trace, batch=self.batch, new_tokens=self.new_tokens)

    def record(self, steps: Sequence[RecordedStep]) -> dict[str, RecordedForecasts]:
        """Return the forecasts for these steps by key.

        The bound has none: `replay` knows the routing when a system names the oracle.
        """
        recorded = {}
        for key in (self.predictor, self.reuse_predictor):
            if key == TRUTH:
                recorded[key] = perfect_forecasts(steps, self.spec)
            elif key is not None and key != ORACLE:
                recorded[key] = record_forecasts(self.predictors[key].load(self.spec), steps)
        return recorded


def run_job(job: ReplayJob, on_finished: Callable[[str, ReplayRow], None]) -> None:
    """Replay each case of the job and call `on_finished` with its digest and figures."""
    # The command has verified the trace; hashing it again in each worker would take longer.
    steps = job.steps(Trace.open(job.trace, verify=False))
    routed = [routing_only(step, job.spec.num_layers) for step in steps]
    recorded = job.record(steps)
    bounds: dict[tuple[str, str], TimeBound] = {}
    for digest, case in job.cases:
        stats = replay_case(case, routed, recorded, job.spec)
        place = case.hardware.name, case.condition.budget
        if place not in bounds:
            slots = budget_slots(case.condition.budget, job.spec, case.hardware)
            bounds[place] = bound_time(
                routed, spec=job.spec, hardware=case.hardware, num_slots=slots
            )
        on_finished(digest, measure_replay(stats, case, routed, job.spec, bounds[place]))


def replay_case(
    case: ReplayCase,
    steps: Sequence[RoutedStep],
    recorded: Mapping[str, RecordedForecasts],
    spec: ModelSpec,
    *,
    observer: Observer | None = None,
) -> ReplayStats:
    """Replay the steps with one system, from empty arenas."""
    variant = case.variant
    reuse = variant.reuse_predictor
    return replay(
        steps,
        replayed_predictor(variant, recorded, spec),
        spec=spec,
        system=variant.system,
        hardware=case.hardware,
        budget_slots=budget_slots(case.condition.budget, spec, case.hardware),
        reuse_predictor=None if reuse is None else recorded[reuse].predictor(spec),
        observer=observer,
    )


def replayed_predictor(
    variant: Variant, recorded: Mapping[str, RecordedForecasts], spec: ModelSpec
) -> Predictor | None:
    """Return the recorded forecasts from the first step on; None for the bound."""
    if variant.predictor is None or variant.predictor == ORACLE:
        return None
    forecasts = recorded[variant.predictor]
    if variant.distance is not None:
        forecasts = forecasts.at_distance(variant.distance)
    return forecasts.predictor(spec)


def measure_replay(
    stats: ReplayStats,
    case: ReplayCase,
    steps: Sequence[RoutedStep],
    spec: ModelSpec,
    bound: TimeBound,
) -> ReplayRow:
    decode = sum_counters(stats.decode)
    decoding = sum(stats.tpot_seconds)
    assert bound.decode_seconds <= decoding * (1 + ROUNDING), (case, bound, decoding)
    assert bound.prefill_seconds <= sum(stats.ttft_seconds) * (1 + ROUNDING), (case, bound)
    tokens = sum(len(step.tokens_T) for step in steps if is_decode(step))
    seconds = decoding + sum(stats.ttft_seconds)
    variant, condition = case.variant, case.condition
    slots = budget_slots(condition.budget, spec, case.hardware)
    return ReplayRow(
        part=case.part,
        system=variant.label,
        hardware=case.hardware.name,
        budget=condition.budget,
        batch=condition.batch,
        predictor=variant.predictor,
        distance=variant.distance,
        ttft_ms=percentile_ms(stats.ttft_seconds, 50),
        tpot_ms=percentile_ms(stats.tpot_seconds, 50),
        tpot_p95_ms=percentile_ms(stats.tpot_seconds, 95),
        tpot_p99_ms=percentile_ms(stats.tpot_seconds, 99),
        tokens_per_second=tokens / decoding,
        share_of_least_time=bound.decode_seconds / decoding,
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
    )


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else None


def percentiles_ms(seconds: Sequence[float]) -> list[float]:
    """Return the distribution for its plot, rounded because every replay keeps it."""
    shares = np.linspace(0, 100, CDF_POINTS)
    return [round(1e3 * float(value), 4) for value in np.percentile(seconds, shares)]


class FinishedReplays:
    """Figures of the run folder's finished replays, a JSON file for each digest."""

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Return the file of a replay, which exists once it is finished."""
        return self._folder / f"{digest}.json"

    def read(self, digest: str) -> ReplayRow:
        return ReplayRow(**json.loads(self.path(digest).read_bytes()))

    def write(self, digest: str, row: ReplayRow) -> None:
        """Write the figures atomically, so that an interrupted run leaves no partial file."""
        write_atomic(self.path(digest), json.dumps(asdict(row), allow_nan=False).encode())


def code_digest() -> str:
    """Return the sha256 of the sources that replays run: other code replays again."""
    root = Path(__file__).resolve().parents[2]
    whole = hashlib.sha256()
    for place in map(root.joinpath, CODE):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            whole.update(path.read_bytes())
    return whole.hexdigest()


def run_jobs(
    jobs: Sequence[ReplayJob], *, folder: Path, workers: int, advance: Callable[[int], None]
) -> None:
    """Run the jobs, the longest first, and keep each replay when it is finished.

    One worker is this process. Ctrl-C ends the others at once and keeps what is finished.
    `advance` is called with the number of replays that have finished since its last call.
    """
    ordered = sorted(jobs, key=lambda job: len(job.cases) * (1 + 1 / job.batch), reverse=True)
    finished = FinishedReplays(folder)
    if workers == 1 or len(jobs) == 1:

        def keep(digest: str, row: ReplayRow) -> None:
            finished.write(digest, row)
            advance(1)

        for job in ordered:
            run_job(job, keep)
        return
    # Spawned, not forked: this process may have threads (onnxruntime, the progress bar).
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    digests = [digest for job in jobs for digest, _ in job.cases]
    with ProcessPoolExecutor(
        max_workers=min(workers, len(jobs)), mp_context=context, initializer=_ignore_interrupts
    ) as pool:
        futures = [pool.submit(_run_in_worker, job, folder) for job in ordered]
        try:
            for num_done in _watch(futures, finished, digests):
                advance(num_done)
        except BaseException:
            # Leaving the pool would wait for jobs whose results are no longer needed.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _watch(
    futures: Iterable[Future[None]], finished: FinishedReplays, digests: Iterable[str]
) -> Iterator[int]:
    """Yield now and then how many more replays are finished; raise what a job raised."""
    running, left = set(futures), set(digests)
    while running:
        ended, running = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        for future in ended:
            future.result()
        done = {digest for digest in left if finished.path(digest).exists()}
        left -= done
        yield len(done)


def _ignore_interrupts() -> None:
    """Leave Ctrl-C, which reaches every process of the terminal, to the first one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_in_worker(job: ReplayJob, folder: Path) -> None:
    run_job(job, FinishedReplays(folder).write)
