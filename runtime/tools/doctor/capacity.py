"""Machines, budgets and links for a number of users, from simulated replays of recorded routing.

For each machine: how many users it can decode together, the smallest budget for experts that still
serves them, and hence the number of machines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.config import ShapeConfig, SystemConfig
from runtime.engine.auto_budget import PROCESS_BYTES
from runtime.policy.counters import sum_counters
from runtime.sim.hardware import Hardware
from runtime.sim.replay import ReplayStats, replay
from runtime.sim.step import RecordedStep, batch_steps, first_request

PRECISION = 0.02
"""Share of all experts by which the budget may exceed the smallest possible one."""


@dataclass(frozen=True, kw_only=True)
class UserLoad:
    """The load to serve."""

    users: int
    """Concurrent users."""
    tokens_per_second: float
    """Decode throughput for each user."""

    @property
    def tpot_seconds(self) -> float:
        return 1 / self.tokens_per_second


@dataclass(frozen=True, kw_only=True)
class CapacityContext:
    """Recorded routing, model and system of all replays."""

    steps: Sequence[RecordedStep]
    spec: ModelSpec
    shape: ShapeConfig
    """Shape of the model to serve; the routing is that of `spec`'s model."""
    system: SystemConfig
    predictor: Predictor | None

    @property
    def num_experts(self) -> int:
        return self.spec.num_layers * self.spec.num_experts

    @property
    def layer_ratio(self) -> float:
        """Layers of the served shape per replayed layer."""
        return self.shape.num_layers / self.spec.num_layers

    @property
    def num_requests(self) -> int:
        """Number of recorded requests that generated tokens: the largest batch."""
        decodes = [step for step in self.steps if len(step.tokens_T) == 1]
        return len({first_request(step) for step in decodes})

    @property
    def experts_bytes(self) -> int:
        shape = self.shape
        return shape.num_layers * shape.num_experts * shape.expert_bytes


@dataclass(frozen=True)
class WarmReplay:
    """A second replay of the same requests, with the cache as the first one left it.

    Times are scaled to the shape's number of layers.
    """

    stats: ReplayStats
    """Counters and times of both replays."""
    layer_ratio: float

    @property
    def decode_seconds(self) -> list[float]:
        """Times of the second replay's decode steps, ascending."""
        steps = self.stats.tpot_seconds
        return sorted(self.layer_ratio * seconds for seconds in steps[len(steps) // 2 :])

    @property
    def prefill_seconds(self) -> list[float]:
        steps = self.stats.ttft_seconds
        return [self.layer_ratio * seconds for seconds in steps[len(steps) // 2 :]]

    @property
    def tpot_seconds(self) -> float:
        """Mean time per output token, which determines a user's throughput."""
        return fmean(self.decode_seconds)


def run_replay(
    context: CapacityContext, hardware: Hardware, *, slots: int, batch: int, passes: int = 2
) -> ReplayStats:
    """Replay the recorded steps `passes` times in batches of `batch` requests."""
    steps = list(batch_steps(context.steps, batch))
    return replay(
        steps * passes,
        context.predictor,
        spec=context.spec,
        system=context.system,
        hardware=hardware,
        budget_slots=slots,
    )


def replay_warm(
    context: CapacityContext, hardware: Hardware, *, slots: int, batch: int
) -> WarmReplay:
    return WarmReplay(run_replay(context, hardware, slots=slots, batch=batch), context.layer_ratio)


def candidate_batches(load: UserLoad, most: int) -> list[int]:
    """List the users per machine to try, largest first: all, or powers of two."""
    powers = [2**i for i in range(most.bit_length()) if 2**i <= min(most, load.users)]
    return sorted({*powers, min(most, load.users)}, reverse=True)


@dataclass(frozen=True, kw_only=True)
class CapacityRow:
    """Requirements on one machine; bytes, seconds and shares of 1."""

    hardware: str
    system: str
    error: str | None = None
    """The reason why no budget is enough; there are no figures then."""
    users_of_a_machine: int = 0
    machines: int = 0
    budget_share: float = 0.0
    """Share of all experts."""
    budget_bytes: int = 0
    memory_bytes: int = 0
    behind_link_bytes: int = 0
    """Bytes of experts in host memory or on disk."""
    tokens_per_second_of_a_user: float = 0.0
    tokens_per_second: float = 0.0
    tpot_seconds: float = 0.0
    tpot_p95_seconds: float = 0.0
    ttft_seconds: float | None = None
    hit_rate: float = 0.0
    stall_share: float = 0.0
    link_share: float = 0.0


def plan_machine(context: CapacityContext, hardware: Hardware, load: UserLoad) -> CapacityRow:
    """Find users per machine, the smallest budget and the number of machines."""
    slowest = math.inf
    for batch in candidate_batches(load, context.num_requests):
        resident = replay_warm(context, hardware, slots=context.num_experts, batch=batch)
        slowest = resident.tpot_seconds
        if resident.tpot_seconds <= load.tpot_seconds:
            # Distribute the users evenly over the smallest number of machines.
            batch = math.ceil(load.users / math.ceil(load.users / batch))
            slots, warm = find_smallest_budget(context, hardware, load, batch, resident)
            return make_row(context, hardware, load, batch, slots, warm)
    error = (
        f"even with all experts in memory a single user gets {1 / slowest:.1f} tokens/s: "
        "computing takes longer"
    )
    return CapacityRow(hardware=hardware.name, system=context.system.name, error=error)


def find_smallest_budget(
    context: CapacityContext,
    hardware: Hardware,
    load: UserLoad,
    batch: int,
    resident: WarmReplay,
) -> tuple[int, WarmReplay]:
    """Find the fewest slots that are enough by bisection, within `PRECISION` of all experts."""
    too_few, enough, best = context.spec.top_k - 1, context.num_experts, resident
    while enough - too_few > max(1, PRECISION * context.num_experts):
        middle = (too_few + enough) // 2
        slots = max(context.spec.top_k, middle)
        warm = replay_warm(context, hardware, slots=slots, batch=batch)
        if warm.tpot_seconds <= load.tpot_seconds:
            enough, best = middle, warm
        else:
            too_few = middle
    return max(context.spec.top_k, enough), best


def make_row(
    context: CapacityContext,
    hardware: Hardware,
    load: UserLoad,
    batch: int,
    slots: int,
    warm: WarmReplay,
) -> CapacityRow:
    """Compute the requirements for a batch and a number of slots."""
    shape, share = context.shape, slots / context.num_experts
    budget = math.ceil(share * context.experts_bytes)
    cold = run_replay(context, hardware, slots=slots, batch=batch, passes=1)
    first, both = sum_counters(cold.decode), sum_counters(warm.stats.decode)
    seconds = sum(warm.decode_seconds) + sum(warm.prefill_seconds)
    chunk = max(hardware.chunk_bytes)
    moved_bytes = warm.stats.total.bytes_moved - cold.total.bytes_moved
    link_seconds = context.layer_ratio * moved_bytes / chunk * hardware.transfer_seconds(chunk)
    stall_seconds = context.layer_ratio * (warm.stats.stall_seconds - cold.stall_seconds)
    decodes = warm.decode_seconds
    return CapacityRow(
        hardware=hardware.name,
        system=context.system.name,
        users_of_a_machine=batch,
        machines=math.ceil(load.users / batch),
        budget_share=share,
        budget_bytes=budget,
        # Without embeddings.
        memory_bytes=budget + shape.num_layers * shape.layer_bytes + PROCESS_BYTES,
        behind_link_bytes=context.experts_bytes if share < 1 else 0,
        tokens_per_second_of_a_user=1 / warm.tpot_seconds,
        tokens_per_second=load.users / warm.tpot_seconds,
        tpot_seconds=warm.tpot_seconds,
        tpot_p95_seconds=decodes[min(len(decodes) - 1, int(0.95 * len(decodes)))],
        ttft_seconds=fmean(warm.prefill_seconds) if warm.prefill_seconds else None,
        hit_rate=(both.hits - first.hits) / max(1, both.requests - first.requests),
        stall_share=stall_seconds / seconds,
        link_share=min(1.0, link_seconds / seconds),
    )


def choose_system(
    context: CapacityContext, hardware: Hardware, load: UserLoad, other: SystemConfig
) -> CapacityRow:
    """Plan with the context's system and with `other`, without a predictor; return the cheaper."""
    rows = [plan_machine(replace(context, system=other, predictor=None), hardware, load)]
    if context.predictor is not None:
        rows.insert(0, plan_machine(context, hardware, load))
    feasible = [row for row in rows if row.error is None]
    return min(feasible, key=lambda row: (row.machines, row.budget_bytes)) if feasible else rows[0]
