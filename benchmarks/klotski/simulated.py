"""The paper's environments, simulated: throughput against n and the batch size (figure 14).

Prompts of 512 tokens and 32 new ones (Klotski, section 9.1). Each token's routing is drawn from the
reference model's recorded tokens, folded to Mixtral's 8 experts of which 2 are chosen; 12 of its 32
or 56 layers are simulated and times scaled. Attention is computed batch by batch, an expert on all
batches' tokens at once, as the paper has it; only experts are moved.

Shape suffixes: T tokens, K top_k, L layers.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from benchmarks.klotski.rows import SimulatedRow
from benchmarks.papers.klotski import ENVIRONMENTS
from benchmarks.papers.paper_context import ExpertFold, load_hardware, load_shape
from benchmarks.reports import print_line
from collect.traces import Trace, TraceSignal
from predictors.base import Ints
from predictors.correlation import CorrelationPredictor
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.presets import ON_DEMAND, load_system
from runtime.sim.hardware import RooflineHardware, describe_hardware
from runtime.sim.replay import replay
from train.evaluate.forecasts import RoutedStep

PROMPT_TOKENS, NEW_TOKENS = 512, 32
SIMULATED_STEPS = 8
"""Decode steps that are simulated; the others are taken to be like them."""
BATCHES = (4, 16, 64)
GROUPS = (1, 2, 4, 8, 15)


@dataclass(frozen=True, kw_only=True)
class BatchedRoofline(RooflineHardware):
    """A machine that computes a layer, apart from its experts, batch by batch."""

    n: int

    def layer_seconds(self, num_tokens: int) -> float:
        return self.n * super().layer_seconds(-(-num_tokens // self.n))


class RoutingPool:
    """The routing of recorded tokens, to draw steps from."""

    def __init__(self, trace: Trace, fold: ExpertFold):
        rows = trace.rows("held_out")
        self._experts_LTK = np.stack(
            [
                fold.fold_experts(trace.column(TraceSignal.EXPERTS, layer)[rows].astype(np.int64))
                for layer in range(trace.spec.num_layers)
            ]
        )

    def step(self, requests: int, tokens: int, rng: np.random.Generator) -> RoutedStep:
        """Draws the routing of that many tokens of each request."""
        total = requests * tokens
        picked = rng.integers(0, self._experts_LTK.shape[1], total)
        requests_T: Ints = np.repeat(np.arange(requests), tokens)
        return RoutedStep(np.zeros(total, np.int64), requests_T, self._experts_LTK[:, picked])


def simulate_group(
    pool: RoutingPool, spec: ModelSpec, system: SystemConfig, environment: str, batch: int, n: int
) -> SimulatedRow:
    """Simulates one group of batches."""
    place = ENVIRONMENTS[environment]
    shape = load_shape(place.shape)
    profile = describe_hardware(load_hardware(place.hardware), shape)
    hardware = BatchedRoofline(
        **{field.name: getattr(profile, field.name) for field in fields(profile)}, n=n
    )
    rng = np.random.default_rng(0)
    requests = batch * n
    steps = [pool.step(requests, PROMPT_TOKENS, rng)]
    steps += [pool.step(requests, 1, rng) for _ in range(SIMULATED_STEPS)]
    stats = replay(
        steps,
        CorrelationPredictor.empty(spec) if system.prefetch else None,
        spec=spec,
        system=system,
        hardware=hardware,
        budget_slots=max(spec.top_k + 1, int(place.share * spec.num_layers * spec.num_experts)),
    )
    scale = shape.num_layers / spec.num_layers
    decode = float(np.mean(stats.tpot_seconds[1:]))
    seconds = scale * (sum(stats.ttft_seconds) + (NEW_TOKENS - 1) * decode)
    return SimulatedRow(
        environment=environment,
        system=system.name,
        batch=batch,
        n=n,
        tokens_per_second=requests * NEW_TOKENS / seconds,
        decode_stall_share=stats.decode_stall_seconds / sum(stats.tpot_seconds),
    )


def simulate(path: Path) -> list[SimulatedRow]:
    """Simulates every batch size and n in every environment, and single batches on demand."""
    trace = Trace.open(path)
    pool = RoutingPool(trace, ExpertFold(trace.spec.num_experts, 8, 2))
    spec = replace(trace.spec, num_experts=8, top_k=2)
    on_demand, klotski = load_system(ON_DEMAND), load_system("klotski")
    rows = []
    for environment in ENVIRONMENTS:
        for batch in BATCHES:
            rows.append(simulate_group(pool, spec, on_demand, environment, batch, 1))
            rows += [simulate_group(pool, spec, klotski, environment, batch, n) for n in GROUPS]
        print_line(f"simulated: {environment}")
    return rows
