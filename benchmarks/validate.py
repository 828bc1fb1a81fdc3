"""The simulator next to live runs: the same steps served here, and replayed on the machine `local`.

Routing is recorded once: it is the same in every run, bit for bit, and each run's tokens are
checked. For each budget and system a model is loaded without prefetching and measured
(`runtime.profiling.local`); another is loaded with the system, serves the prompts from an empty
arena, and the latency of its predictor is measured afterwards. Repetitions are interleaved over all
cells. Replays take the medians of the machine over the measurements of all cells, because a disk of
a shared machine is up to four times as fast in one measurement as in another, and those of the
predictor over the measurements of their cell.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from benchmarks.config import ValidateConfig
from benchmarks.greedy import generate_greedy
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.errors import MoecastError
from predictors.spec import ModelSpec
from runtime import load
from runtime.config import SystemConfig
from runtime.engine.forecasters import (
    AvailablePredictors,
    SystemPredictors,
)
from runtime.hf.probes import Probes
from runtime.presets import ON_DEMAND, load_system
from runtime.profiling.local import measure
from runtime.sim.hardware import MeasuredHardware, PredictorLatencies
from runtime.sim.replay import ReplayStats, replay
from runtime.sim.step import ArrayStep
from runtime.tools.doctor import SIGNALS, RoutingRecorder
from runtime.tools.verify.reference import token_prompts

PROMPTS = [
    "The heart pumps blood through the body, and the blood carries oxygen to",
    "def read_lines(path):\n    with open(path) as file:\n        ",
    "It was a dark and stormy night when the ship left the harbour for",
]
TPOT_WITHIN = 0.10
HITS_WITHIN = 0.01

Profile = TypeVar("Profile")


COUNTED = ("hit_rate", "bytes_moved", "stall_seconds", "predicted")
"""Statistics of a run that are compared."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFigures:
    tpot_seconds: float
    ttft_seconds: float
    hit_rate: float
    bytes_moved: float
    stall_seconds: float
    predicted: float
    """Experts that forecasts named in time."""


@dataclass(frozen=True, kw_only=True)
class LiveFigures(SimulatedFigures):
    """Medians over the live runs of a cell."""

    tpot_seconds_of_each_run: list[float]


@dataclass(frozen=True, kw_only=True)
class ValidateRow:
    budget: str
    system: str
    slots: int
    live: LiveFigures
    simulated: SimulatedFigures
    tpot_ratio: float
    """Simulated over live."""
    hit_rate_difference: float
    tpot_within: bool
    """The ratio is within `TPOT_WITHIN` of 1."""
    hits_within: bool
    profile: dict[str, Any]
    """The machine that the replay took, without the latencies of other predictors."""


@dataclass(frozen=True)
class LiveRun:
    """Figures of one live run."""

    decode_seconds: list[float]
    prefill_seconds: list[float]
    counted: dict[str, float]
    """Statistics of the run, those in `COUNTED`."""


@dataclass
class ValidateCell:
    """A budget and a system, and everything that was measured of them."""

    budget: str
    system: SystemConfig
    slots: int = 0
    runs: list[LiveRun] = field(default_factory=list)
    profiles: list[MeasuredHardware] = field(default_factory=list)


def median_profile(profiles: Sequence[Profile]) -> Profile:
    """Returns one profile with the median of each number; all else is that of the first."""
    first: Any = profiles[0]
    values: dict[str, Any] = {}
    for item in fields(first):
        column = [getattr(profile, item.name) for profile in profiles]
        value = column[0]
        if is_dataclass(value):
            values[item.name] = median_profile(column)
        elif isinstance(value, float):
            values[item.name] = statistics.median(column)
        else:
            values[item.name] = value
    return type(first)(**values)


def answer_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    return [
        generate_greedy(model, torch.tensor([list(prompt)]), new_tokens)[0].tolist()
        for prompt in prompts
    ]


def record_steps(
    folder: str, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[list[ArrayStep], list[list[int]], ModelSpec]:
    """Returns every step with the predictors' signals, the tokens, and the model's shape."""
    model = load(folder, system=load_system(ON_DEMAND), budget="100%")
    recorder = RoutingRecorder()
    with Probes(model, SIGNALS, recorder):
        tokens = answer_prompts(model, prompts, new_tokens)
    model.moecast.close()
    return recorder.steps, tokens, model.moecast.spec


def measure_computing(folder: str, cell: ValidateCell) -> MeasuredHardware:
    """Measures the machine without transfers.

    The repeated token that is measured must find its experts in memory, so nothing is prefetched
    and nothing is dropped after its use.
    """
    system = replace(cell.system, prefetch=False, idle_prefetch=False, drop_used=False)
    model = load(folder, system=system, budget=cell.budget)
    profile = measure(model)
    model.moecast.close()
    return profile


def take_predictor(computing: MeasuredHardware, system: MeasuredHardware) -> MeasuredHardware:
    """Returns the machine that computes as the first and predicts as the second."""
    inline = system.overheads.predictor_inline
    return replace(
        computing,
        predictor_seconds=system.predictor_seconds,
        predictor_latencies=system.predictor_latencies,
        overheads=replace(computing.overheads, predictor_inline=inline),
    )


def run_live(
    folder: str,
    cell: ValidateCell,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    expected: list[list[int]],
) -> float:
    """Adds a run from an empty arena, and the machine that it ran on; returns its seconds."""
    profile = measure_computing(folder, cell)
    model = load(folder, system=cell.system, budget=cell.budget)
    start = time.perf_counter()
    tokens = answer_prompts(model, prompts, new_tokens)
    seconds = time.perf_counter() - start
    assert tokens == expected, f"{cell.budget}, {cell.system.name}: other tokens"
    stats, times = model.moecast.stats(), model.moecast.engine.stats
    cell.runs.append(
        LiveRun(
            list(times.decode_seconds),
            list(times.prefill_seconds),
            {name: stats[name] for name in COUNTED},
        )
    )
    cell.slots = stats["arena_slots"]
    if cell.system.prefetch:
        profile = take_predictor(profile, measure(model))
    model.moecast.close()
    cell.profiles.append(profile)
    return seconds


def load_predictors(system: SystemConfig, spec: ModelSpec) -> SystemPredictors:
    """Loads the predictors that live runs of the system begin with.

    Raises:
        MoecastError: The zoo has none for this model.
    """
    source = AvailablePredictors(spec=spec, name=spec.model_id)
    forecast, missing = source.load_forecaster(system)
    reuse, reuse_missing = source.load_reuse(system)
    if missing or reuse_missing:
        raise MoecastError(
            f"system {system.name} lacks a predictor for {spec.model_id}: it "
            f"{' and '.join(filter(None, (missing, reuse_missing)))}. Leave it out of `system`"
        )
    return SystemPredictors(forecast=forecast, reuse=reuse)


def replay_cell(
    cell: ValidateCell, steps: Sequence[ArrayStep], spec: ModelSpec, profile: MeasuredHardware
) -> ReplayStats:
    """Replays the recorded steps with the predictors that the live runs began with."""
    predictors = load_predictors(cell.system, spec)
    return replay(
        steps,
        predictors.forecast,
        spec=spec,
        system=cell.system,
        hardware=profile,
        budget_slots=cell.slots,
        reuse_predictor=predictors.reuse,
    )


def compare(
    cell: ValidateCell,
    steps: Sequence[ArrayStep],
    spec: ModelSpec,
    machine: MeasuredHardware,
) -> ValidateRow:
    """Replays a cell on `machine`, with its own predictor, and compares it with its live runs."""
    profile = take_predictor(machine, median_profile(cell.profiles))
    stats = replay_cell(cell, steps, spec, profile)
    figures, hit_rate = stats.as_dict(), stats.total.hit_rate
    assert hit_rate is not None
    live = LiveFigures(
        tpot_seconds=statistics.median(t for run in cell.runs for t in run.decode_seconds),
        tpot_seconds_of_each_run=[statistics.median(run.decode_seconds) for run in cell.runs],
        ttft_seconds=statistics.median(t for run in cell.runs for t in run.prefill_seconds),
        **{name: statistics.median(run.counted[name] for run in cell.runs) for name in COUNTED},
    )
    ratio = figures["tpot_seconds"] / live.tpot_seconds
    difference = hit_rate - live.hit_rate
    return ValidateRow(
        budget=cell.budget,
        system=cell.system.name,
        slots=cell.slots,
        live=live,
        simulated=SimulatedFigures(
            tpot_seconds=figures["tpot_seconds"],
            ttft_seconds=figures["ttft_seconds"],
            hit_rate=hit_rate,
            bytes_moved=stats.total.bytes_moved,
            stall_seconds=figures["stall_seconds"],
            predicted=stats.total.predicted,
        ),
        tpot_ratio=ratio,
        hit_rate_difference=difference,
        tpot_within=abs(ratio - 1) <= TPOT_WITHIN,
        hits_within=abs(difference) <= HITS_WITHIN,
        profile=asdict(replace(profile, predictor_latencies=PredictorLatencies())),
    )


def describe_row(row: ValidateRow) -> str:
    """Returns live and simulated figures; an exclamation mark where they differ too much."""
    return (
        f"{row.budget}, {row.system}: {1e3 * row.live.tpot_seconds:.2f} ms a token, simulated "
        f"{1e3 * row.simulated.tpot_seconds:.2f} ms{'' if row.tpot_within else ' !'}; hits "
        f"{100 * row.live.hit_rate:.2f} %, simulated {100 * row.simulated.hit_rate:.2f} %"
        f"{'' if row.hits_within else ' !'}"
    )


def run_validate(config: ValidateConfig) -> None:
    machine = describe_machine(torch.get_num_threads())
    folder = str(config.model)
    prompts, _ = token_prompts(config.model, PROMPTS, seed=0)
    steps, expected, spec = record_steps(folder, prompts, config.max_new_tokens)
    systems = [system for system in config.system if not system.knows_future]
    for system in systems:
        load_predictors(system, spec)  # before anything is measured
    cells = [ValidateCell(budget, system) for budget in config.budget for system in systems]
    for _ in range(config.repetitions):
        for cell in cells:
            seconds = run_live(folder, cell, prompts, config.max_new_tokens, expected)
            print_line(f"{cell.budget}, {cell.system.name}: {seconds:.1f} s")
    profile = median_profile([profile for cell in cells for profile in cell.profiles])
    rows = [compare(cell, steps, spec, profile) for cell in cells]
    for row in rows:
        print_line(describe_row(row))
    write_report(
        config,
        machine=machine,
        threads=torch.get_num_threads(),
        prompts=len(prompts),
        new_tokens=config.max_new_tokens,
        expert_bytes=sum(cells[0].profiles[0].chunk_bytes),
        tpot_within=sum(row.tpot_within for row in rows),
        hits_within=sum(row.hits_within for row in rows),
        cells=len(rows),
        rows=rows,
    )
