"""The paper's environments, simulated: throughput against n and the batch size (figure 14)."""

from pathlib import Path

from benchmarks.klotski.environments import (
    ENVIRONMENTS,
    describe_machine,
    make_predictor,
    replay_groups,
)
from benchmarks.klotski.rows import SimulatedRow
from benchmarks.klotski.workload import TokenPool, tile_spec
from benchmarks.reports import print_line
from collect.traces import Trace
from runtime.config import SystemConfig
from runtime.presets import ON_DEMAND, load_system

BATCHES = (4, 16, 64)
GROUPS = (1, 2, 4, 8, 15)


class GroupSimulation:
    """Groups on the paper's machines, drawn from one trace.

    Args:
        trace: The trace, with generated tokens.
    """

    def __init__(self, trace: Trace):
        self._trace = trace
        self._held_out = TokenPool(trace)
        self._train = TokenPool(trace, split="train")

    def run(self, system: SystemConfig, environment: str, *, batch: int, n: int) -> SimulatedRow:
        """Simulates one group, after the caches were filled."""
        place = ENVIRONMENTS[environment]
        workload = place.workload(batch=batch, n=n, merges_experts=True)
        spec = tile_spec(self._trace, place.model)
        times = replay_groups(
            system,
            workload,
            describe_machine(place, workload),
            spec=spec,
            arena_bytes=place.arena_bytes,
            predictor=make_predictor(system, spec, self._train),
            pool=self._held_out,
            groups=1,
        )
        return SimulatedRow(
            environment=environment,
            system=system.name,
            batch=batch,
            n=n,
            tokens_per_second=times.tokens_per_second[0],
            decode_stall_share=times.stall_share,
        )


def simulate(path: Path) -> list[SimulatedRow]:
    """Simulates every batch size and n in every environment, and single batches on demand."""
    simulation = GroupSimulation(Trace.open(path))
    on_demand, klotski = load_system(ON_DEMAND), load_system("klotski")
    rows = []
    for environment in ENVIRONMENTS:
        for batch in BATCHES:
            rows.append(simulation.run(on_demand, environment, batch=batch, n=1))
            rows += [simulation.run(klotski, environment, batch=batch, n=n) for n in GROUPS]
        print_line(f"simulated: {environment}")
    return rows
