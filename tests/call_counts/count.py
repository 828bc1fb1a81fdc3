"""Counts calls of this project's functions on the model's thread in a decode step.

A count repeats exactly, unlike a time: what a router requests arrives at once, prefetches stay in
the ring, and prefetching does not turn itself off. Calls of compiled functions are not reported, so
that the policy core runs uncompiled: the counts are those of its Python files. Up to Python 3.11 a
comprehension is a call; none is counted.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.control_plane.measure import Contender
from benchmarks.control_plane.model import VOCABULARY, RandomShape, write_model, write_predictors
from benchmarks.control_plane.sections import StepProfiler
from runtime.config import ModelConfig, PageCache, StoreConfig
from runtime.engine import assembly
from runtime.engine.loading import LoadOptions, load_model
from runtime.policy.budget import Budget
from runtime.policy.tier import TransferTask
from runtime.presets import load_system
from runtime.transfer.file_ring import StoreRing
from runtime.transfer.ring import Arrivals

COUNTS = Path(__file__).with_name("counts.json")
COMMAND = "python -m tests.call_counts"
ALLOWED = 0.10
"""Growth of a count that is accepted."""
NOTABLE = 0.02
"""Fall of a count that is reported."""
SHAPE = RandomShape(num_layers=6, num_experts=16, top_k=3, hidden_size=32, expert_width=8)
WARM_UP, STEPS = 8, 8
WAIT_SECONDS = 240.0

Counts = Mapping[str, float]
"""Calls per layer and token, by the file of the function."""

CELLS = {
    f"{system}, {name}": (system, budget)
    for system in ("on-demand", "promoe", "moecast")
    for name, budget in (("all resident", "100%"), ("25 %", "25%"))
}
"""System and budget of each cell."""


class PromptRing(StoreRing):
    """Requests have arrived when `submit` returns; prefetches wait for ever."""

    def __init__(self, arrivals: Arrivals, *args: Any, **kwargs: Any):
        super().__init__(arrivals, *args, **kwargs)
        self._arrivals = arrivals
        self._prefetches: set[int] = set()

    def submit(self, ticket: int, task: TransferTask) -> None:
        if task.high:
            super().submit(ticket, task)
            assert self._arrivals.wait(WAIT_SECONDS)
        else:
            self._prefetches.add(ticket)

    def cancel(self, ticket: int) -> bool:
        self._prefetches.remove(ticket)
        return True


def write_random_model(folder: Path) -> tuple[ModelConfig, Path]:
    """Write a model and its predictors; return its configuration and the predictors' folder."""
    model = write_model(SHAPE, folder / "model", seed=0)
    write_predictors(model, folder / "entries", seed=0)
    return model, folder / "entries"


@torch.no_grad()
def count_calls(model: ModelConfig, entries: Path, cell: str) -> Counts:
    """Count the calls of one cell, after steps that fill the arena."""
    name, budget = CELLS[cell]
    system = replace(load_system(name), adaptive=False)
    with patch.object(assembly, "StoreRing", PromptRing):
        loaded = load_model(
            LoadOptions(
                model=model,
                system=system,
                budget=Budget.parse(budget),
                entries=entries,
                # Direct reads are not the same on every file system.
                store=StoreConfig(page_cache=PageCache.KEEP),
            )
        )
    engine = loaded.moecast.engine
    with closing(loaded.moecast):
        contender, profiler = Contender(cell, loaded, engine), StepProfiler()
        contender.step(range(1, VOCABULARY))
        for token in range(WARM_UP):
            contender.step([token])
        before = engine.report()
        for token in range(WARM_UP, WARM_UP + STEPS):
            contender.step([token], profiler)
        after = engine.report()
    missed = after["misses"] - before["misses"]
    assert (missed == 0) == (budget == "100%"), f"{cell}: {missed} misses"
    assert not after["predictor_failures"]
    forecasts = name != "on-demand" and budget != "100%"
    assert (after["predictor_seconds"] > 0) == forecasts, "forecast in vain, or nothing"
    return {
        file: round(number / STEPS / SHAPE.num_layers, 1)
        for file, number in profiler.calls().items()
    }


def read_counts() -> dict[str, Counts]:
    return json.loads(COUNTS.read_text())


def write_counts(counts: Mapping[str, Counts]) -> None:
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n")


def describe_change(cell: str, now: Counts, before: Counts) -> str:
    """Return the totals, and the files with the largest changes."""
    change = {file: now.get(file, 0.0) - before.get(file, 0.0) for file in {*now, *before}}
    largest = sorted(change.items(), key=lambda item: (-abs(item[1]), item[0]))[:5]
    files = ", ".join(f"{file} {calls:+.1f}" for file, calls in largest if abs(calls) >= 0.1)
    return (
        f"{cell}: {sum(now.values()):.1f} calls per layer and token, {sum(before.values()):.1f} "
        f"committed ({files})"
    )
