"""How long things take: on a described machine, or on this one, measured."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from runtime.config import HardwareConfig, ShapeConfig
from runtime.sim.overheads import Overheads

NUM_CHUNKS = 3
"""promoe 5.1: an expert's three linear layers."""

KERNELS_PER_LAYER = 20
"""Norms, projections, attention, residuals, router, shared expert: launches before the experts."""

KERNELS_PER_EXPERT = 4
"""Two products, the activation, the weighted sum."""


class Hardware(Protocol):
    """Times in seconds of everything that a replay needs."""

    @property
    def name(self) -> str: ...

    @property
    def predictor_seconds(self) -> float:
        """Latency of one prediction, beside the computation."""
        ...

    @property
    def chunk_bytes(self) -> tuple[int, ...]:
        """Sizes of an expert's chunks."""
        ...

    @property
    def overheads(self) -> Overheads:
        """What a live run pays beside these times."""
        ...

    def transfer_seconds(self, num_bytes: int, *, tier: int = 0) -> float:
        """One chunk over the link into a tier, counted from the one that computes."""
        ...

    def layer_seconds(self, num_tokens: int) -> float:
        """All of a layer but its routed experts."""
        ...

    def expert_seconds(self, num_tokens: int) -> float:
        """One expert on its tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A described accelerator: the larger of memory time and arithmetic time, plus launches."""

    name: str
    link_bytes_per_second: float
    link_latency_seconds: float
    memory_bytes_per_second: float
    flops: float
    kernel_seconds: float
    predictor_seconds: float
    chunk_bytes: tuple[int, ...]
    layer_bytes: int
    bytes_per_weight: float = 2.0
    store_latency_seconds: float = 0.0
    store_bytes_per_second: float = math.inf
    overheads: Overheads = Overheads()
    host_share: float = 1.0
    """Of all experts that host memory below the device can hold; from 1 on, there is one link."""

    def transfer_seconds(self, num_bytes: int, *, tier: int = 0) -> float:
        if tier == 0:
            return self.link_latency_seconds + num_bytes / self.link_bytes_per_second
        return self.store_latency_seconds + num_bytes / self.store_bytes_per_second

    def _compute_seconds(self, num_bytes: int, num_tokens: int) -> float:
        arithmetic = 2 * (num_bytes / self.bytes_per_weight) * num_tokens / self.flops
        return max(num_bytes / self.memory_bytes_per_second, arithmetic)

    def layer_seconds(self, num_tokens: int) -> float:
        launches = KERNELS_PER_LAYER * self.kernel_seconds
        return launches + self._compute_seconds(self.layer_bytes, num_tokens)

    def expert_seconds(self, num_tokens: int) -> float:
        launches = KERNELS_PER_EXPERT * self.kernel_seconds
        return launches + self._compute_seconds(sum(self.chunk_bytes), num_tokens)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A machine whose times were taken: a fixed part and one per token or byte."""

    name: str
    chunk_bytes: tuple[int, ...]
    transfer_fixed: float
    transfer_per_byte: float
    layer_fixed: float
    layer_per_token: float
    expert_fixed: float
    expert_per_token: float
    predictor_seconds: float
    step_seconds: float = 0.0
    """A whole decode step with all experts there, of which the other times are parts."""
    overheads: Overheads = Overheads()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for results."""
        return asdict(self)

    def transfer_seconds(self, num_bytes: int, *, tier: int = 0) -> float:
        assert tier == 0, "one tier is measured"
        return self.transfer_fixed + self.transfer_per_byte * num_bytes

    def layer_seconds(self, num_tokens: int) -> float:
        return self.layer_fixed + self.layer_per_token * num_tokens

    def expert_seconds(self, num_tokens: int) -> float:
        return self.expert_fixed + self.expert_per_token * num_tokens


def described(config: HardwareConfig, shape: ShapeConfig) -> Roofline:
    """The machine that a configuration describes, with experts of the size that the shape gives.

    A shape that is the traced model's own has been read from it before (`profiling.shapes`).
    """
    assert not config.measured, config.name
    assert not shape.is_own, shape.name
    return Roofline(
        name=config.name,
        link_bytes_per_second=config.link_bytes_per_second,
        link_latency_seconds=config.link_latency_us * 1e-6,
        memory_bytes_per_second=config.memory_bytes_per_second,
        flops=config.flops,
        kernel_seconds=config.kernel_us * 1e-6,
        predictor_seconds=config.predictor_us * 1e-6,
        chunk_bytes=in_chunks(shape.expert_bytes),
        layer_bytes=shape.layer_bytes,
        bytes_per_weight=shape.bytes_per_weight,
        store_latency_seconds=config.store_latency_us * 1e-6,
        store_bytes_per_second=config.store_bytes_per_second or math.inf,
        host_share=_host_share(config, shape),
    )


def _host_share(config: HardwareConfig, shape: ShapeConfig) -> float:
    total = shape.num_layers * shape.num_experts * shape.expert_bytes
    return config.host_bytes / total if config.host_bytes and total else 1.0


def in_chunks(num_bytes: int) -> tuple[int, ...]:
    """An expert's bytes as `NUM_CHUNKS` sizes, as even as whole bytes allow."""
    return tuple((num_bytes + i) // NUM_CHUNKS for i in range(NUM_CHUNKS))


def tier_slots(hardware: Hardware, slots: int, num_experts: int) -> list[int]:
    """Slots of each tier, the computing one's `slots` first: of host memory too where the machine
    has too little of it for the shape; the same share of the `num_experts` that are replayed.
    """
    if not isinstance(hardware, Roofline) or hardware.host_share >= 1.0:
        return [slots]
    return [slots, max(slots, int(hardware.host_share * num_experts))]
