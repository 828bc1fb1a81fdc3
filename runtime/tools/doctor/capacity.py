"""What a load needs: users, each of whom is to get so many tokens a second, on each machine.

Replays of recorded routing (`runtime.sim`): how many users one machine can decode together, the
smallest budget for experts that still serves them, and so how many machines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.config import ShapeConfig, SystemConfig
from runtime.policy.counters import sum_counters
from runtime.sim.hardware import Hardware
from runtime.sim.replay import ReplayStats, replay
from runtime.sim.step import RecordedStep, batch_steps, first_request
from runtime.tools.doctor.outlook import PROCESS_BYTES

PRECISION = 0.02
"""Share of all experts by which a budget found may be above the smallest."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked for."""

    users: int
    """At the same time."""
    tokens_per_second: float
    """That each of them is to get."""

    @property
    def tpot_seconds(self) -> float:
        return 1 / self.tokens_per_second


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What every replay rests on."""

    steps: Sequence[RecordedStep]
    spec: ModelSpec
    shape: ShapeConfig
    """Of the model that is to be served; the routing is that of `spec`."""
    system: SystemConfig
    predictor: Predictor | None

    @property
    def num_experts(self) -> int:
        return self.spec.num_layers * self.spec.num_experts

    @property
    def deeper(self) -> float:
        """Layers of the shape for each that is replayed."""
        return self.shape.num_layers / self.spec.num_layers

    @property
    def num_requests(self) -> int:
        """Recorded requests that generated tokens: the largest batch."""
        decodes = [step for step in self.steps if len(step.tokens_T) == 1]
        return len({first_request(step) for step in decodes})

    @property
    def experts_bytes(self) -> int:
        shape = self.shape
        return shape.num_layers * shape.num_experts * shape.expert_bytes

    @property
    def other_bytes(self) -> int:
        """Weights beside the experts that layers read; embeddings are not among them."""
        return self.shape.num_layers * self.shape.layer_bytes


@dataclass(frozen=True)
class Warm:
    """A second pass over the same requests, from the arena that the first one left.

    Times are of the shape's number of layers.
    """

    stats: ReplayStats
    """Of both passes."""
    deeper: float

    @property
    def decode_seconds(self) -> list[float]:
        """Of the second pass's decode steps, ascending."""
        steps = self.stats.tpot_seconds
        return sorted(self.deeper * one for one in steps[len(steps) // 2 :])

    @property
    def prefill_seconds(self) -> list[float]:
        steps = self.stats.ttft_seconds
        return [self.deeper * one for one in steps[len(steps) // 2 :]]

    @property
    def tpot_seconds(self) -> float:
        """Mean: what a user's rate comes from."""
        return fmean(self.decode_seconds)


def replayed(
    ground: Ground, hardware: Hardware, *, slots: int, batch: int, passes: int = 2
) -> ReplayStats:
    steps = list(batch_steps(ground.steps, batch))
    return replay(
        steps * passes,
        ground.predictor,
        spec=ground.spec,
        system=ground.system,
        hardware=hardware,
        budget_slots=slots,
    )


def warm(ground: Ground, hardware: Hardware, *, slots: int, batch: int) -> Warm:
    return Warm(replayed(ground, hardware, slots=slots, batch=batch), ground.deeper)


def batches(load: Load, most: int) -> list[int]:
    """Users of one machine that are tried, the most first: all, or a power of two."""
    powers = [2**i for i in range(most.bit_length()) if 2**i <= min(most, load.users)]
    return sorted({*powers, min(most, load.users)}, reverse=True)


def needed(ground: Ground, hardware: Hardware, load: Load) -> dict[str, Any]:
    """A row: users of a machine, its budget and memory, machines; or why no budget is enough."""
    row: dict[str, Any] = {"hardware": hardware.name}
    slowest = math.inf
    for batch in batches(load, ground.num_requests):
        whole = warm(ground, hardware, slots=ground.num_experts, batch=batch)
        slowest = whole.tpot_seconds
        if whole.tpot_seconds <= load.tpot_seconds:
            # As few machines, but no fuller than they must be.
            batch = math.ceil(load.users / math.ceil(load.users / batch))
            slots, found = smallest(ground, hardware, load, batch, whole)
            return row | figures(ground, hardware, load, batch, slots, found)
    return row | {
        "error": (
            f"with every expert in memory a user alone gets {1 / slowest:.1f} tokens a second: "
            "computing takes longer"
        )
    }


def smallest(
    ground: Ground, hardware: Hardware, load: Load, batch: int, whole: Warm
) -> tuple[int, Warm]:
    """By bisection: the fewest slots that are enough, within `PRECISION` of all."""
    too_few, enough, found = ground.spec.top_k - 1, ground.num_experts, whole
    while enough - too_few > max(1, PRECISION * ground.num_experts):
        middle = (too_few + enough) // 2
        tried = warm(ground, hardware, slots=max(ground.spec.top_k, middle), batch=batch)
        if tried.tpot_seconds <= load.tpot_seconds:
            enough, found = middle, tried
        else:
            too_few = middle
    return max(ground.spec.top_k, enough), found


def figures(
    ground: Ground, hardware: Hardware, load: Load, batch: int, slots: int, found: Warm
) -> dict[str, Any]:
    """A row's values; bytes, seconds and shares."""
    share = slots / ground.num_experts
    budget = math.ceil(share * ground.experts_bytes)
    cold = replayed(ground, hardware, slots=slots, batch=batch, passes=1)
    first, both = sum_counters(cold.decode), sum_counters(found.stats.decode)
    seconds = sum(found.decode_seconds) + sum(found.prefill_seconds)
    chunk = max(hardware.chunk_bytes)
    num_chunks = ground.deeper * (found.stats.total.bytes_moved - cold.total.bytes_moved) / chunk
    decodes = found.decode_seconds
    return {
        "users_of_a_machine": batch,
        "machines": math.ceil(load.users / batch),
        "budget_share": share,
        "budget_bytes": budget,
        "memory_bytes": budget + ground.other_bytes + PROCESS_BYTES,
        "behind_link_bytes": ground.experts_bytes if share < 1 else 0,
        "tokens_per_second_of_a_user": 1 / found.tpot_seconds,
        "tokens_per_second": load.users / found.tpot_seconds,
        "tpot_seconds": found.tpot_seconds,
        "tpot_p95_seconds": decodes[min(len(decodes) - 1, int(0.95 * len(decodes)))],
        "ttft_seconds": fmean(found.prefill_seconds) if found.prefill_seconds else None,
        "hit_rate": (both.hits - first.hits) / max(1, both.requests - first.requests),
        "stall_share": ground.deeper * (found.stats.stall_seconds - cold.stall_seconds) / seconds,
        "link_share": min(1.0, num_chunks * hardware.transfer_seconds(chunk) / seconds),
    }


def better(ground: Ground, hardware: Hardware, load: Load, other: SystemConfig) -> dict[str, Any]:
    """The system of `ground` or `other`, which forecasts nothing, whichever needs less."""
    rows = [
        needed(one, hardware, load) | {"system": one.system.name}
        for one in (ground, replace(ground, system=other, predictor=None))
        if one.predictor is not None or one.system is other
    ]
    fit = [row for row in rows if "error" not in row]
    return min(fit, key=lambda row: (row["machines"], row["budget_bytes"])) if fit else rows[0]
