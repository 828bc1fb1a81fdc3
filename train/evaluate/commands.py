"""`python -m train.evaluate`: the steps in order, and what is told on the way."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from collect.traces import Trace
from runtime.commands.progress import progress
from runtime.sim.hardware import Hardware
from train.evaluate.arms import Arms, arms_of
from train.evaluate.cells import ABLATION, DISTANCE, TABLE, Cell, figure_cells, table_cells
from train.evaluate.config import OURS, EvaluateConfig
from train.evaluate.pool import Cells, code_digest, run_jobs
from train.evaluate.replaying import Job
from train.evaluate.report import write_report
from train.evaluate.results import results_of
from train.evaluate.setting import check, figure_place, machines_of, open_trace, traced_model
from train.evaluate.sources import Sources
from train.evaluate.table import show
from train.evaluate.timeline import timelines


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Replays every system in every cell; returns what results.json holds.

    Interrupted, the same command with the same run_dir goes on: a finished cell is a file there,
    named by the digest of all that decides its figures.
    """
    assert config.run_dir is not None
    started = time.perf_counter()
    trace = open_trace(config)
    model = traced_model(trace, config.model)
    machines = machines_of(config.hardware, config.shape, model)
    check(config, trace, machines)
    sources = Sources(trace, model=model, entries=config.entries, seed=config.seed)
    sys.stderr.write("looking up predictors, counting those that need no training\n")
    arms = arms_of(config, sources)
    for name, why in arms.missing.items():
        sys.stderr.write(f"left out: {name}: {why}\n")
    cells = cells_of(config, arms, machines)
    finished = replay_all(cells, trace, sources, config, folder=config.run_dir / "cells")
    results = results_of(
        config,
        trace=trace,
        machines=machines,
        arms=arms,
        sources=sources.found,
        cells=list(zip(cells, finished, strict=True)),
        seconds=time.perf_counter() - started,
    )
    show(results, console=Console())
    if config.figures:
        page = report(config, trace, sources, arms, machines[0], results, finished)
        sys.stderr.write(f"report: {page}\n")
    return results


def report(
    config: EvaluateConfig,
    trace: Trace,
    sources: Sources,
    arms: Arms,
    machine: Hardware,
    results: Mapping[str, Any],
    finished: Sequence[Mapping[str, Any]],
) -> Path:
    """Writes report.html; the timeline is replayed for it, on `machine`."""
    assert config.run_dir is not None
    budget, batch = figure_place(config)
    names = dict.fromkeys((config.baseline.name, config.ablated.name, OURS, config.bound.name))
    spans = timelines(
        [arm for arm in map(arms.named, names) if arm is not None],
        trace=trace,
        sources=sources.found,
        hardware=machine,
        budget=budget,
        batch=batch,
    )
    return write_report(
        results,
        finished,
        spans,
        subject=config.ablated.name,
        folder=config.run_dir,
        budget=budget,
        batch=batch,
    )


def cells_of(config: EvaluateConfig, arms: Arms, machines: Sequence[Hardware]) -> list[Cell]:
    """All cells: those of the table, then those of the figures."""
    budget, batch = figure_place(config)
    cells = list(
        table_cells(arms.table, machines=machines, budgets=config.budget, batches=config.batches)
    )
    for part, of_part in ((ABLATION, arms.ablation), (DISTANCE, arms.distance)):
        cells += figure_cells(part, of_part, machines=machines, budget=budget, batch=batch)
    assert cells[0].part == TABLE
    return cells


def replay_all(
    cells: Sequence[Cell],
    trace: Trace,
    sources: Sources,
    config: EvaluateConfig,
    *,
    folder: Path,
) -> list[dict[str, Any]]:
    """The figures of each cell: as they are in the folder, or replayed now."""
    digests = digests_of(cells, trace, sources, config)
    kept = Cells(folder)
    wanted: dict[str, Cell] = {}
    for digest, cell in zip(digests, cells, strict=True):
        if config.fresh or kept.get(digest) is None:
            wanted[digest] = cell
    workers = config.workers or os.cpu_count() or 1
    console = Console(stderr=True)
    if len(wanted) < len(set(digests)):
        there = len(set(digests)) - len(wanted)
        console.print(f"{there} of {len(set(digests))} cells are there already", highlight=False)
    jobs = jobs_of(wanted, trace, sources, config.new_tokens)
    with progress(console, "replaying", total=len(wanted)) as advance:
        run_jobs(jobs, folder=folder, workers=workers, advance=advance)
    found = [kept.get(digest) for digest in digests]
    assert None not in found
    return [one for one in found if one is not None]


def digests_of(
    cells: Sequence[Cell], trace: Trace, sources: Sources, config: EvaluateConfig
) -> list[str]:
    """Names of the cells: equal names mean equal figures."""
    code = code_digest()
    by_key = {key: source.digest for key, source in sources.found.items()}
    found = []
    for cell in cells:
        played = [
            by_key.get(key or "", "") for key in (cell.arm.predictor, cell.arm.reuse_predictor)
        ]
        found.append(cell.digest(trace.digest, str(config.new_tokens), code, *played))
    return found


def jobs_of(wanted: dict[str, Cell], trace: Trace, sources: Sources, new_tokens: int) -> list[Job]:
    """The cells, those together that share steps and forecasts."""
    groups: dict[tuple[Any, ...], list[tuple[str, Cell]]] = {}
    for digest, cell in wanted.items():
        arm = cell.arm
        key: tuple[Any, ...] = (cell.batch, arm.predictor, arm.reuse_predictor)
        if arm.predictor is None or arm.predictor not in sources.found:
            # Nothing to be made once for all of them: smaller jobs share the work better.
            key = (*key, arm.label, cell.hardware.name)
        groups.setdefault(key, []).append((digest, cell))
    return [
        Job(
            trace=trace.path,
            spec=trace.spec,
            batch=batch,
            new_tokens=new_tokens,
            predictor=predictor,
            reuse_predictor=reuse_predictor,
            sources={
                name: sources.found[name]
                for name in (predictor, reuse_predictor)
                if name in sources.found
            },
            cells=members,
        )
        for (batch, predictor, reuse_predictor, *_), members in groups.items()
    ]
