"""`python -m tests.call_counts.count`: counts calls in a decode step, and writes the table.

They are calls of this project's functions on the model's thread. A count repeats, unlike a time:
what a router requests arrives at once, prefetches stay in the ring, and prefetching does not turn
itself off. Only moecast's at 25 % is a fifth larger on a busy machine, for which it is written. The
policy core runs uncompiled: the counts are those of its Python files. Up to Python 3.11 a
comprehension is a call; none is counted.
"""

from contextlib import closing
from dataclasses import replace
from functools import cache
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
from runtime.hf import linear
from runtime.policy.budget import Budget
from runtime.policy.tier import TransferTask
from runtime.presets import load_system
from runtime.transfer.file_ring import StoreRing
from runtime.transfer.ring import ARRIVED, Arrivals
from tests.builders.committed_counts import CommittedCounts, Counts

SHAPE = RandomShape(num_layers=6, num_experts=16, top_k=3, hidden_size=32, expert_width=8)
WARM_UP, STEPS = 8, 8


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
            self.transfer(task)
            self._arrivals.post(ticket, ARRIVED, 1e-3)
        else:
            self._prefetches.add(ticket)

    def cancel(self, ticket: int) -> bool:
        self._prefetches.remove(ticket)
        return True


@torch.no_grad()
# On some processors PyTorch's kernels have other bits than ours, and no products are ours.
@patch.object(linear, "_has_equal_bits", cache(lambda *_: True))
def count_calls(model: ModelConfig, entries: Path, cell: str) -> Counts:
    """Count the calls of one cell, after steps that fill the arena."""
    name, budget = CELLS[cell]
    system = replace(load_system(name), adaptive=False)
    # Direct reads are not the same on every file system.
    places = {"entries": entries, "store": StoreConfig(page_cache=PageCache.KEEP)}
    options = LoadOptions(model=model, system=system, budget=Budget.parse(budget), **places)
    with patch.object(assembly, "StoreRing", PromptRing):
        loaded = load_model(options)
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
    num_layers = STEPS * SHAPE.num_layers
    return {file: round(number / num_layers, 1) for file, number in profiler.calls().items()}


def count(folder: Path) -> dict[str, Counts]:
    model, entries = write_model(SHAPE, folder / "model", seed=0), folder / "entries"
    write_predictors(model, entries, seed=0)
    return {cell: count_calls(model, entries, cell) for cell in CELLS}


COUNTS = CommittedCounts("tests.call_counts.count", Path(__file__).with_name("counts.json"), count)
"""Calls per layer and token, by the file of the function."""

if __name__ == "__main__":
    COUNTS.main()
