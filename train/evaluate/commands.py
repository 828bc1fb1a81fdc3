"""`moecast evaluate`: opens the inputs, replays every system and compares them."""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from collect.traces import Trace
from collect.traces.layout import ALL_SIGNALS
from predictors.errors import MoecastError
from predictors.registry import separate_run
from runtime.commands.progress import progress
from runtime.config import HardwareConfig, ModelConfig, ShapeConfig
from runtime.errors import CheckpointError
from runtime.sim.hardware import Hardware, describe_hardware
from runtime.store.model_source import identity, resolve
from train.errors import TrainError
from train.evaluate.config import EvaluateConfig
from train.evaluate.forecasts import held_out_steps
from train.evaluate.jobs import ReplayJob, ReplayRow, code_digest
from train.evaluate.report import write_report
from train.evaluate.results import make_results
from train.evaluate.sources import PredictorSources
from train.evaluate.table import show
from train.evaluate.variants import (
    ReplayCase,
    Variants,
    figure_condition,
    list_cases,
    list_variants,
)
from train.find_trace import find_trace, open_named_trace
from train.replay import budget_slots
from train.resumable import FinishedPieces, run_jobs


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a comparison is made from."""

    config: EvaluateConfig
    trace: Trace
    machines: Sequence[Hardware]
    sources: PredictorSources
    variants: Variants

    @property
    def run_dir(self) -> Path:
        """Folder of results.json, report.html and the finished replays."""
        assert self.config.run_dir is not None
        return self.config.run_dir


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Replay every system in every condition and return what results.json holds.

    An interrupted command resumes when it is given the same run_dir: a finished replay is a file
    there, named by the digest of everything that decides its figures.
    """
    started = time.perf_counter()
    predictor, entries = separate_run(config.predictor, config.entries)
    config = replace(config, predictor=predictor, entries=entries)
    trace = open_trace(config)
    model = find_traced_model(trace, config.model)
    machines = list_machines(config.hardware, config.shape, model)
    check_budgets(config, trace, machines)
    sources = PredictorSources(trace, model=model, entries=config.entries, seed=config.seed)
    sys.stderr.write("finding predictors and counting those that need no training\n")
    variants = list_variants(config, sources)
    for name, reason in variants.missing.items():
        sys.stderr.write(f"left out: {name}: {reason}\n")
    comparison = Comparison(
        config=config, trace=trace, machines=machines, sources=sources, variants=variants
    )
    rows = replay_all(list(list_cases(config, variants, machines)), comparison)
    results = make_results(
        config,
        trace=trace,
        machines=machines,
        variants=variants,
        predictors=sources.found,
        rows=rows,
        seconds=time.perf_counter() - started,
    )
    show(results, console=Console())
    if config.figures:
        condition = figure_condition(config)
        path = write_report(results, rows, folder=comparison.run_dir, condition=condition)
        sys.stderr.write(f"report: {path}\n")
    return results


def replay_all(cases: Sequence[ReplayCase], comparison: Comparison) -> list[ReplayRow]:
    """Return the figures of each case, from the run folder or replayed now."""
    config = comparison.config
    folder = comparison.run_dir / "replays"
    finished = FinishedPieces(folder)
    digests = name_replays(cases, comparison)
    missing = {
        digest: case
        for digest, case in zip(digests, cases, strict=True)
        if config.overwrite or not finished.path(digest).exists()
    }
    console = Console(stderr=True)
    total = len(set(digests))
    if len(missing) < total:
        console.print(f"{total - len(missing)} of {total} replays are finished", highlight=False)
    jobs = group_jobs(missing.items(), comparison)
    workers = config.workers or os.cpu_count() or 1
    with progress(console, "replaying", total=len(missing)) as advance:
        run_jobs(jobs, folder=folder, workers=workers, advance=advance)
    return [ReplayRow(**finished.read(digest)) for digest in digests]


def name_replays(cases: Sequence[ReplayCase], comparison: Comparison) -> list[str]:
    """Return a digest for each case: equal digests mean equal figures."""
    code = code_digest()
    of_predictor = {key: stored.digest for key, stored in comparison.sources.found.items()}
    digests = []
    for case in cases:
        keys = (case.variant.predictor, case.variant.reuse_predictor)
        forecasts = [of_predictor.get(key or "", "") for key in keys]
        replay_tokens = str(comparison.config.replay_tokens)
        digests.append(case.digest(comparison.trace.digest, replay_tokens, code, *forecasts))
    return digests


def group_jobs(cases: Iterable[tuple[str, ReplayCase]], comparison: Comparison) -> list[ReplayJob]:
    """Return jobs of the cases that share steps and forecasts."""
    available = comparison.sources.found
    groups: dict[tuple[Any, ...], list[tuple[str, ReplayCase]]] = {}
    for digest, case in cases:
        variant = case.variant
        key: tuple[Any, ...] = (case.condition.batch, variant.predictor, variant.reuse_predictor)
        if variant.predictor is None or variant.predictor not in available:
            # No forecasts to record once for all of them: smaller jobs share the work better.
            key = (*key, variant.label, case.hardware.name)
        groups.setdefault(key, []).append((digest, case))
    return [
        ReplayJob(
            trace=comparison.trace.path,
            spec=comparison.trace.spec,
            batch=batch,
            new_tokens=comparison.config.replay_tokens,
            predictor=predictor,
            reuse_predictor=reuse_predictor,
            predictors={
                key: available[key] for key in (predictor, reuse_predictor) if key in available
            },
            cases=members,
        )
        for (batch, predictor, reuse_predictor, *_), members in groups.items()
    ]


def open_trace(config: EvaluateConfig) -> Trace:
    """Open the named trace, of any model, or the model's own, recorded if it is missing.

    Raises:
        TrainError: the named trace is not there or incomplete.
        TraceError: it is damaged, or not finished.
        PromptError, DiskSpaceError, CheckpointError: it cannot be recorded.
    """
    if config.trace is not None:
        return open_named_trace(config.trace, config.model)
    return find_trace(config, ALL_SIGNALS)


def find_traced_model(trace: Trace, model: ModelConfig) -> ModelConfig | None:
    """Return the configured model if it is the traced one and on this machine, else None."""
    try:
        made_for = identity(resolve(model), model)
    except CheckpointError:
        return None
    recorded = trace.spec.as_dict()
    return model if all(recorded[key] == value for key, value in made_for.items()) else None


def list_machines(
    hardware: Sequence[HardwareConfig], shape: ShapeConfig, model: ModelConfig | None
) -> list[Hardware]:
    """Return the machines with experts of the shape's size or, if measured, the model's.

    Raises:
        TrainError: the model is needed and is not on this machine.
    """
    own = [f"hardware={config.name}" for config in hardware if config.measured]
    own += ["shape=trace"] * shape.is_own
    if own and model is None:
        raise TrainError(
            f"{own[0]} needs the traced model, which is not on this machine: name it "
            "(model=..., model.id=FOLDER), or choose shape=qwen1.5-moe and hardware=rtx4090-pcie4"
        )
    if not own:
        return [describe_hardware(config, shape) for config in hardware]
    # Late: torch, to load the model.
    from train.replay import describe_machines

    assert model is not None
    return describe_machines(hardware, shape, model)


def check_budgets(config: EvaluateConfig, trace: Trace, machines: Sequence[Hardware]) -> None:
    """Refuse, before hours of replays, budgets and batches that cannot be replayed.

    Raises:
        BudgetError: a budget is malformed, or too small for the experts of one token.
        TrainError: fewer held-out requests than a batch, or no generated tokens.
    """
    for machine in machines:
        for budget in config.budget:
            budget_slots(budget, trace.spec, machine)
    for batch in config.batches:
        try:
            held_out_steps(trace, batch=batch, new_tokens=config.replay_tokens)
        except TrainError:
            raise
        except MoecastError as error:
            raise TrainError(
                f"batch_size={batch}: the trace {trace.path} has too few held-out requests "
                f"({error})"
            ) from error
