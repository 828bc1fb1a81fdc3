"""The paper's machines with its models (Klotski, table 2)."""

from dataclasses import dataclass, fields, replace

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
from runtime.sim.hardware import (
    KERNELS_PER_EXPERT,
    Overheads,
    RooflineHardware,
    describe_hardware,
)


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


def make_predictor(system: SystemConfig, spec: ModelSpec, pool: TokenPool) -> Predictor | None:
    """Returns the system's predictor, whose correlation table the pool's requests fill."""
    if not system.prefetch:
        return None
    if system.predictor == "dependency":
        return DependencyPredictor(spec)
    assert system.predictor == "correlation", system.predictor
    return fill_correlation_table(spec, pool)
