"""`python -m tests.devices.count`: counts what a decode step costs on a GPU, and writes the table.

Launches of kernels, copies, waits of the host and calls of this project's functions, per layer and
token, on a simulated device with all experts in host memory. No copy ends before somebody waits for
it, which is the worst case. The policy core runs uncompiled, so that its calls are counted, too.
With `--print` it prints the counts as JSON and writes nothing.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.control_plane.sections import StepProfiler
from runtime.config import Exact
from runtime.presets import load_system
from tests.builders.committed_counts import CommittedCounts, Counts
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import serving, settle
from tests.builders.sim_device.backend import simulated

NAMES = ("launches", "copies to the device", "copies to the host", "synchronisations", "queries")
CALLS = "calls"
ALLOWED = 0.1
"""Growth of a count that is accepted."""
NUM_LAYERS, WARM_UP, STEPS = 4, 4, 6
CELLS = {
    f"{system}, {exact.value}, {budget}": (system, exact, budget)
    for system in ("on-demand", "promoe", "moecast")
    for exact in (Exact.EAGER, Exact.GROUPED)
    for budget in ("25%", "100%")
    if (system, budget) != ("moecast", "100%")  # those of promoe: nothing is forecast
}


@torch.no_grad()
def count_cell(folder: Path, cell: str) -> Counts:
    name, exact, budget = CELLS[cell]
    system, profiler = replace(load_system(name), adaptive=False), StepProfiler()
    with simulated() as sim:
        options = {"budget": budget, "host_budget": "100%", "exact": exact, "predictor": None}
        if name != "on-demand":
            options["predictor"] = "skip"
        with serving(folder, device="sim", system=system, **options) as model:
            past = model(torch.arange(1, 9, device="sim")[None], use_cache=True).past_key_values
            for step in range(WARM_UP + STEPS):
                if step == WARM_UP:
                    settle(model.moecast.engine)
                    sim.random.random = lambda: 1.0
                    sim.counts.clear()
                token = torch.full((1, 1), 9 + step, device="sim")
                with profiler if step >= WARM_UP else nullcontext():
                    model(token, past_key_values=past, use_cache=True)
            counts = {**{name: sim.counts[name] for name in NAMES}, CALLS: 0}
            counts[CALLS] = sum(profiler.calls().values())
            return {name: round(n / STEPS / NUM_LAYERS, 2) for name, n in counts.items()}


def write_model(folder: Path, *, top_k: int = 3) -> Path:
    return tiny_qwen2_moe(folder / "model", num_layers=NUM_LAYERS, num_experts=12, top_k=top_k)


def count(folder: Path) -> dict[str, Counts]:
    model = write_model(folder)
    return {cell: count_cell(model, cell) for cell in CELLS}


COUNTS = CommittedCounts("tests.devices.count", Path(__file__).with_name("counts.json"), count)

if __name__ == "__main__":
    COUNTS.main()
