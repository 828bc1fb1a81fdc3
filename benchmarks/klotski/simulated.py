"""The paper's environments, simulated: throughput against n and the batch size (figure 14)."""

import itertools
from pathlib import Path

import numpy as np

from benchmarks.klotski.environments import (
    ENVIRONMENTS,
    GroupMachine,
    describe_machine,
    make_predictor,
)
from benchmarks.klotski.group_simulator import make_group_machine
from benchmarks.klotski.rows import SimulatedRow
from benchmarks.klotski.workload import NEW_TOKENS, GroupWorkload, TokenPool, tile_spec
from benchmarks.reports import print_line
from collect.traces import Trace
from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.presets import ON_DEMAND, load_system
from runtime.sim.replay import replay

BATCHES = (4, 16, 64)
GROUPS = (1, 2, 4, 8, 15)


def replay_group(
    system: SystemConfig,
    workload: GroupWorkload,
    machine: GroupMachine,
    *,
    spec: ModelSpec,
    arena_bytes: float,
    predictor: Predictor | None,
    pool: TokenPool,
) -> tuple[float, float]:
    """Replays a group, after a step that fills the caches.

    Args:
        system: The system.
        workload: The group's requests.
        machine: The machine.
        spec: The model.
        arena_bytes: Device memory for experts.
        predictor: The system's predictor.
        pool: Tokens to draw requests from.

    Returns:
        Throughput in tokens a second, prompts included, and the share of the decode steps' time in
        which the computation waits.
    """
    rng = np.random.default_rng(0)
    slots = min(spec.num_layers * spec.num_experts, int(arena_bytes / sum(machine.chunk_bytes)))
    stats = replay(
        itertools.chain(workload.draw_decode_steps(pool, 1, rng), workload.draw(pool, rng)),
        predictor,
        spec=spec,
        system=system,
        hardware=machine,
        budget_slots=slots,
        make_machine=make_group_machine,
    )
    (prefill_seconds,), decode_seconds = stats.ttft_seconds, np.mean(stats.tpot_seconds[1:])
    seconds = prefill_seconds + (NEW_TOKENS - 1) * float(decode_seconds)
    return (
        workload.num_requests * NEW_TOKENS / seconds,
        stats.decode_stall_seconds / sum(stats.tpot_seconds),
    )


def simulate(path: Path) -> list[SimulatedRow]:
    """Simulates every batch size and n in every environment, and single batches on demand."""
    trace = Trace.open(path)
    held_out, train = TokenPool(trace), TokenPool(trace, split="train")
    rows = []
    for name, environment in ENVIRONMENTS.items():
        spec = tile_spec(trace, environment.model)
        for batch, (kind, n) in itertools.product(
            BATCHES, ((ON_DEMAND, 1), *(("klotski", n) for n in GROUPS))
        ):
            system = load_system(kind)
            workload = environment.workload(batch=batch, n=n, merges_experts=True)
            tokens_per_second, stall_share = replay_group(
                system,
                workload,
                describe_machine(environment, workload),
                spec=spec,
                arena_bytes=environment.arena_bytes,
                predictor=make_predictor(system, spec, train),
                pool=held_out,
            )
            rows.append(
                SimulatedRow(
                    environment=name,
                    system=system.name,
                    batch=batch,
                    n=n,
                    tokens_per_second=tokens_per_second,
                    decode_stall_share=stall_share,
                )
            )
        print_line(f"simulated: {name}")
    return rows
