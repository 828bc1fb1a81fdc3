"""`python -m tests.devices.count`: counts what a decode step costs on a GPU, and writes the table.

Launches of kernels, copies, and waits of the host, per layer and token, on a simulated device with
all experts in host memory. No copy ends before somebody waits for it, which is the worst case.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from runtime.config import Exact
from runtime.presets import load_system
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import serve, settle
from tests.builders.sim_device.backend import simulated

COUNTS = Path(__file__).with_name("counts.json")
NAMES = ("launches", "copies to the device", "copies to the host", "synchronisations", "queries")
ALLOWED = 0.1
"""Growth of a count that is accepted."""
NUM_LAYERS, WARM_UP, STEPS = 4, 4, 6
CELLS = {
    f"{system}, {exact.value}, {budget}": (system, exact, budget)
    for system in ("on-demand", "promoe", "moecast")
    for exact in (Exact.EAGER, Exact.GROUPED)
    for budget in ("25%", "100%")
}

Counts = Mapping[str, float]


@torch.no_grad()
def count_cell(folder: Path, cell: str) -> Counts:
    name, exact, budget = CELLS[cell]
    system = replace(load_system(name), adaptive=False)
    with simulated() as sim:
        options = {"budget": budget, "host_budget": "100%", "exact": exact, "predictor": None}
        if name != "on-demand":
            options["predictor"] = "skip"
        model = serve(folder, device="sim", system=system, **options)
        with model.moecast as handle:
            past = model(torch.arange(1, 9, device="sim")[None], use_cache=True).past_key_values
            for step in range(WARM_UP + STEPS):
                if step == WARM_UP:
                    settle(handle.engine)
                    sim.random.random = lambda: 1.0
                    sim.counts.clear()
                token = torch.full((1, 1), 9 + step, device="sim")
                model(token, past_key_values=past, use_cache=True)
            return {n: round(sim.counts[n] / STEPS / NUM_LAYERS, 2) for n in NAMES}


def write_model(folder: Path) -> Path:
    return tiny_qwen2_moe(folder / "model", num_layers=NUM_LAYERS, num_experts=12, top_k=3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        counted = write_model(Path(scratch))
        table = {cell: count_cell(counted, cell) for cell in CELLS}
        COUNTS.write_text(json.dumps(table, indent=1) + "\n")
