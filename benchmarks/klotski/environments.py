"""The paper's machines with its models, and replays of groups on them (Klotski, table 2)."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from benchmarks.klotski.group_simulator import GroupStep, make_group_machine
from benchmarks.klotski.workload import (
    KV_BYTES,
    NEW_TOKENS,
    PROMPT_TOKENS,
    GroupWorkload,
    TokenPool,
    fill_correlation_table,
)
from benchmarks.papers.paper_context import load_hardware, load_shape
from predictors.base import Predictor
from predictors.baselines import DependencyPredictor
from predictors.spec import ModelSpec
from runtime.config import HardwareConfig, ShapeConfig, SystemConfig
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.sim.hardware import (
    KERNELS_PER_EXPERT,
    Overheads,
    RooflineHardware,
    describe_hardware,
)
from runtime.sim.replay import replay


@dataclass(frozen=True, kw_only=True)
class GroupEnvironment:
    """A model on a machine of the paper."""

    shape: str
    hardware: str
    device_bytes: float
    """Memory of the GPU."""
    arena_bytes: float
    """The part of it for experts."""
    n: int
    """Micro-batches of a group (Klotski, section 9.2)."""

    @property
    def model(self) -> ShapeConfig:
        return load_shape(self.shape)

    def cache_bytes(self, num_requests: int) -> int:
        """Returns the size of the KV caches of a group when the last token is generated."""
        return num_requests * (PROMPT_TOKENS + NEW_TOKENS) * KV_BYTES * self.model.num_layers

    def fits(self, num_bytes: float) -> bool:
        """Whether that much fits on the GPU in addition to experts."""
        return num_bytes <= self.device_bytes - self.arena_bytes

    def workload(
        self, *, batch: int, n: int, merges_experts: bool, weight_ratio: float = 1.0
    ) -> GroupWorkload:
        """Returns a group's requests; what does not fit on the GPU next to the experts is moved."""
        layer_bytes = int(weight_ratio * self.model.layer_bytes)
        dense_bytes = layer_bytes * self.model.num_layers
        return GroupWorkload(
            batch=batch,
            n=n,
            merges_experts=merges_experts,
            moves_caches=not self.fits(dense_bytes + self.cache_bytes(batch * n)),
            weight_bytes=0 if self.fits(dense_bytes) else layer_bytes,
        )


ENVIRONMENTS = {
    "environment 1, Mixtral-8x7B": GroupEnvironment(
        shape="mixtral-8x7b", hardware="rtx3090-disk", device_bytes=24e9, arena_bytes=20e9, n=15
    ),
    "environment 1, Mixtral-8x22B": GroupEnvironment(
        shape="mixtral-8x22b", hardware="rtx3090-disk", device_bytes=24e9, arena_bytes=20e9, n=10
    ),
    "environment 2, Mixtral-8x22B": GroupEnvironment(
        shape="mixtral-8x22b", hardware="h800-pcie5", device_bytes=80e9, arena_bytes=70e9, n=15
    ),
}


@dataclass(frozen=True, kw_only=True)
class GroupMachine(RooflineHardware):
    """A machine that may decode quantised experts before it computes them (Klotski, section 7)."""

    plain_bytes: int
    """Size of an expert in the dtype that computes."""

    def expert_seconds(self, num_tokens: int) -> float:
        """Returns the time of an expert: decoded once, then computed on all its tokens."""
        seconds = KERNELS_PER_EXPERT * self.kernel_seconds
        num_bytes = sum(self.chunk_bytes)
        if num_bytes < self.plain_bytes:
            seconds += (num_bytes + self.plain_bytes) / self.memory_bytes_per_second
        return seconds + self._compute_seconds(self.plain_bytes, num_tokens)


def describe_machine(
    environment: GroupEnvironment,
    workload: GroupWorkload,
    *,
    config: HardwareConfig | None = None,
    weight_ratio: float = 1.0,
) -> GroupMachine:
    """Returns the machine; host memory holds the KV caches that are moved, and experts.

    Args:
        environment: The machine and its model.
        workload: A group's requests.
        config: Other hardware in the machine's place.
        weight_ratio: Size of quantised experts / size of 16-bit ones.
    """
    config, shape = config or load_hardware(environment.hardware), environment.model
    if config.host_bytes and workload.moves_caches:
        caches = environment.cache_bytes(workload.num_requests)
        config = replace(config, host_bytes=max(1.0, config.host_bytes - caches))
    stored = replace(shape, expert_bytes=int(weight_ratio * shape.expert_bytes))
    profile = describe_hardware(config, stored)
    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    # Caches and experts share the link.
    values["overheads"] = Overheads(transfer_speed_together=0.5)
    return GroupMachine(**values, plain_bytes=shape.expert_bytes)


@dataclass(frozen=True, kw_only=True)
class GroupTimes:
    """Times of groups one after another, in seconds, and what their decode steps fetched."""

    num_requests: int
    """Requests of each group."""
    prefill_seconds: list[float]
    """Time of each group's prompts."""
    decode_seconds: list[float]
    """Mean time of a decode step of each group."""
    stall_share: float
    """Share of the decode steps' time in which the computation waits."""
    decode: CacheCounters

    @property
    def tokens_per_second(self) -> list[float]:
        """Throughput of each group, prompts included."""
        return [
            self.num_requests * NEW_TOKENS / (prefill + (NEW_TOKENS - 1) * decode)
            for prefill, decode in zip(self.prefill_seconds, self.decode_seconds, strict=True)
        ]


def make_predictor(system: SystemConfig, spec: ModelSpec, pool: TokenPool) -> Predictor | None:
    """Returns the system's predictor, whose correlation table the pool's requests fill."""
    if not system.prefetch:
        return None
    if system.predictor == "dependency":
        return DependencyPredictor(spec)
    assert system.predictor == "correlation", system.predictor
    return fill_correlation_table(spec, pool)


def replay_groups(
    system: SystemConfig,
    workload: GroupWorkload,
    machine: GroupMachine,
    *,
    spec: ModelSpec,
    arena_bytes: float,
    predictor: Predictor | None,
    pool: TokenPool,
    groups: int,
) -> GroupTimes:
    """Replays groups one after another, after a step that fills the caches.

    Args:
        system: The system.
        workload: The requests of a group.
        machine: The machine.
        spec: The model.
        arena_bytes: Device memory for experts.
        predictor: The system's predictor.
        pool: Tokens to draw requests from.
        groups: Number of groups.
    """
    rng = np.random.default_rng(0)

    def draw_steps() -> Iterator[GroupStep]:
        yield from workload.draw_decode_steps(pool, 1, rng)
        for _ in range(groups):
            yield from workload.draw(pool, rng)

    num_experts = spec.num_layers * spec.num_experts
    slots = min(num_experts, int(arena_bytes / sum(machine.chunk_bytes)))
    stats = replay(
        draw_steps(),
        predictor,
        spec=spec,
        system=system,
        hardware=machine,
        budget_slots=slots,
        make_machine=make_group_machine,
    )
    times = np.array(stats.tpot_seconds[1:]).reshape(groups, -1)
    return GroupTimes(
        num_requests=workload.num_requests,
        prefill_seconds=list(stats.ttft_seconds),
        decode_seconds=times.mean(axis=1).tolist(),
        stall_share=stats.decode_stall_seconds / sum(stats.tpot_seconds),
        decode=sum_counters(stats.decode),
    )
