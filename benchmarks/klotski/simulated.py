"""The paper's environments, simulated: tokens a second against n and the batch size (figure 14).

Prompts of 512 tokens and 32 new ones (9.1). Each token's routing is drawn from the reference
model's recorded tokens, folded to Mixtral's 8 experts of which 2 are chosen; 12 of its 32 or 56
layers are simulated and times scaled. Attention is computed batch by batch, an expert on all
batches' tokens at once, as the paper has it; only experts are moved.

Shape suffixes: T tokens, K top_k, L layers.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.papers.ground import Fold, machine, shape_named, systems
from collect.traces import Trace, TraceSignal
from predictors.base import Ints
from predictors.correlation import Correlation
from runtime.config import SystemConfig
from runtime.sim.hardware import Roofline, described
from runtime.sim.replay import replay
from train.evaluate.steps import Routed

PROMPT_TOKENS, NEW_TOKENS = 512, 32
SIMULATED_STEPS = 8
"""Decode steps that are simulated; the others are taken to be like them."""
BATCHES = (4, 16, 64)
GROUPS = (1, 2, 4, 8, 15)
ENVIRONMENTS = {
    "environment 1, Mixtral-8x7B": ("mixtral-8x7b", "rtx3090-disk", 20e9),
    "environment 1, Mixtral-8x22B": ("mixtral-8x22b", "rtx3090-disk", 20e9),
    "environment 2, Mixtral-8x22B": ("mixtral-8x22b", "h800-pcie5", 70e9),
}
"""Shape, machine, bytes of device memory for experts: as in benchmarks/papers/klotski.py."""


@dataclass(frozen=True, kw_only=True)
class InBatches(Roofline):
    """A machine on which a layer but its experts is computed batch by batch."""

    n: int

    def layer_seconds(self, num_tokens: int) -> float:
        return self.n * super().layer_seconds(-(-num_tokens // self.n))


class Tokens:
    """Recorded tokens' routing, to draw steps from."""

    def __init__(self, trace: Trace, fold: Fold):
        rows = trace.rows("held_out")
        self._experts_LTK = np.stack(
            [
                fold.chosen(trace.column(TraceSignal.EXPERTS, layer)[rows].astype(np.int64))
                for layer in range(trace.spec.num_layers)
            ]
        )

    def step(self, requests: int, tokens: int, drawn: np.random.Generator) -> Routed:
        """So many tokens of each request."""
        total = requests * tokens
        picked = drawn.integers(0, self._experts_LTK.shape[1], total)
        requests_T: Ints = np.repeat(np.arange(requests), tokens)
        return Routed(np.zeros(total, np.int64), requests_T, self._experts_LTK[:, picked])


def cell(
    tokens: Tokens, spec: Any, system: SystemConfig, environment: str, batch: int, n: int
) -> dict[str, Any]:
    """One point of figure 14."""
    shape_name, hardware_name, room = ENVIRONMENTS[environment]
    shape = shape_named(shape_name)
    one = described(machine(hardware_name), shape)
    hardware = InBatches(**{field.name: getattr(one, field.name) for field in fields(one)}, n=n)
    share = min(1.0, room / (shape.num_layers * shape.num_experts * shape.expert_bytes))
    drawn = np.random.default_rng(0)
    requests = batch * n
    steps = [tokens.step(requests, PROMPT_TOKENS, drawn)]
    steps += [tokens.step(requests, 1, drawn) for _ in range(SIMULATED_STEPS)]
    predictor = Correlation.empty(spec) if system.prefetch else None
    stats = replay(
        steps,
        predictor,
        spec=spec,
        system=system,
        hardware=hardware,
        budget_slots=max(spec.top_k + 1, int(share * spec.num_layers * spec.num_experts)),
    )
    scale = shape.num_layers / spec.num_layers
    decode = float(np.mean(stats.tpot_seconds[1:]))
    seconds = scale * (sum(stats.ttft_seconds) + (NEW_TOKENS - 1) * decode)
    return {
        "environment": environment,
        "system": system.name,
        "batch": batch,
        "n": n,
        "tokens_per_second": requests * NEW_TOKENS / seconds,
        "decode_stall_share": stats.decode_stall_seconds / sum(stats.tpot_seconds),
    }


def simulated(path: Path, console: Console) -> list[dict[str, Any]]:
    """Every batch size and n in every environment, and single batches on demand."""
    trace = Trace.open(path)
    fold = Fold(trace.spec.num_experts, 8, 2)
    tokens = Tokens(trace, fold)
    spec = replace(trace.spec, num_experts=8, top_k=2)
    known = systems()
    cells = []
    for environment in ENVIRONMENTS:
        for batch in BATCHES:
            cells.append(cell(tokens, spec, known["on-demand"], environment, batch, 1))
            for n in GROUPS:
                cells.append(cell(tokens, spec, known["klotski"], environment, batch, n))
        console.print(f"simulated: {environment}")
    return cells
