"""Times of computing, transfers and forecasts: on a described machine, or measured on this one."""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from predictors.base import Ints, Predictor
from predictors.errors import MoecastError
from runtime.config import HardwareConfig, ShapeConfig, SystemConfig
from runtime.policy.placement import SplitCosts

NUM_CHUNKS = 3
"""An expert's three linear layers (ProMoE, section 5.1)."""

LATENCY_FILE = Path(__file__).with_name("predictor_latency.json")
"""Latencies of predictors of every kind, on one machine, for the shapes of published models, as
`python -m benchmarks latency` measures them. Replays charge them as they are, or in proportion to
the latency of one kind that a described machine states or that was measured on this one."""

KERNELS_PER_LAYER = 20
"""Launches before the experts: norms, projections, attention, residuals, router, shared expert."""

KERNELS_PER_EXPERT = 4
"""Launches of an expert: two products, the activation, the weighted sum."""


@dataclass(frozen=True, kw_only=True)
class TokenLatency:
    """Latency of one prediction: of all of a step's calls, divided by those that forecast."""

    one_us: float
    """For a step of one token."""
    more_us: float
    """For each further row of the step (`Predictor.count_input_rows`)."""

    def microseconds(self, num_rows: int) -> float:
        return self.one_us + self.more_us * (num_rows - 1)


@dataclass(frozen=True, kw_only=True)
class ShapeLatencies:
    """Latencies of each kind of predictor for one model."""

    hidden_size: int
    num_experts: int
    """Experts of all layers together."""
    kinds: Mapping[str, TokenLatency]

    def distance(self, hidden_size: int, num_experts: int) -> float:
        """Returns how far the model is from another: sum of the ratios' logarithms."""
        pairs = (self.hidden_size, hidden_size), (self.num_experts, num_experts)
        return sum(abs(math.log(max(1, first) / max(1, second))) for first, second in pairs)


@dataclass(frozen=True, kw_only=True)
class PredictorLatencies:
    """Latencies in proportion to that of one kind for one token.

    Args:
        kind: The kind that others are compared with.
        measured: Latencies of all kinds; empty: all take the same time.
    """

    kind: str = "mlp"
    measured: Mapping[str, TokenLatency] = field(default_factory=dict)

    @property
    def measured_us(self) -> float:
        """Latency of `kind` for one token, as measured; 0 if it was not."""
        return self.measured[self.kind].one_us if self.kind in self.measured else 0.0

    def ratio(self, kind: str, num_rows: int) -> float:
        """Returns the latency of `kind` for a step of `num_rows`; 1 if it was not measured."""
        if kind not in self.measured or self.kind not in self.measured:
            return 1.0
        return self.measured[kind].microseconds(num_rows) / self.measured[self.kind].one_us


def nearest_latencies(kind: str, *, hidden_size: int, num_experts: int) -> PredictorLatencies:
    """Returns the latencies for the measured shape that is most like this one.

    Args:
        kind: The kind whose latency a machine states.
        hidden_size: Width of the hidden state.
        num_experts: Experts of all layers together.
    """
    shape = min(
        read_latencies().values(), key=lambda shape: shape.distance(hidden_size, num_experts)
    )
    return PredictorLatencies(kind=kind, measured=dict(shape.kinds))


@functools.cache
def read_latencies() -> Mapping[str, ShapeLatencies]:
    """Returns the measured latencies by the shape's name."""
    return {
        name: ShapeLatencies(
            hidden_size=shape["hidden_size"],
            num_experts=shape["num_experts"],
            kinds={kind: TokenLatency(**latency) for kind, latency in shape["kinds"].items()},
        )
        for name, shape in json.loads(LATENCY_FILE.read_text())["shapes"].items()
    }


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Measured costs of a live run in addition to computing and copying; by default none."""

    step_seconds: float = 0.0
    """Time of a forward pass outside of its layers: embedding, head, the hooks at both ends."""
    predictor_inline: bool = False
    """The predictor runs on the thread that computes, which waits for it; off: in parallel."""
    num_readers: int = 1
    """Transfers at once over the lowest link (`STORE_THREADS` of the live engine)."""
    transfer_speed_together: float = 1.0
    """Speed of each of two simultaneous transfers over one link, against one alone: .5 where they
    share a bandwidth, 1 where the link serves both at full speed."""
    transfer_speed_computing: float = 1.0
    """Speed of a transfer during a computation, for the same reasons as below."""
    compute_speed_transferring: float = 1.0
    """Speed of the computation during a transfer of another thread: both use the processor, the
    memory and the interpreter's lock."""


@dataclass(frozen=True, kw_only=True)
class RooflineHardware:
    """A described accelerator: the larger of memory and arithmetic time, plus kernel launches."""

    name: str
    link_bytes_per_second: float
    link_latency_seconds: float
    memory_bytes_per_second: float
    flops: float
    kernel_seconds: float
    predictor_seconds: float
    """Latency of one prediction for one token by the kind that `predictor_latencies` names."""
    chunk_bytes: tuple[int, ...]
    layer_bytes: int
    predictor_latencies: PredictorLatencies = PredictorLatencies()
    """Latencies of other kinds and of more tokens."""
    bytes_per_weight: float = 2.0
    store_latency_seconds: float = 0.0
    store_bytes_per_second: float = math.inf
    overheads: Overheads = Overheads()
    host_memory_bytes_per_second: float = 0.0
    """0: nothing is computed in host memory."""
    host_flops: float = 0.0
    host_share: float = 1.0
    """Share of all experts that fit in host memory below the device; 1 or more: one link."""

    def transfer_seconds(self, num_bytes: int, *, tier: int = 0) -> float:
        """Returns the time of a transfer into a tier; tier 0 is the one that computes."""
        if tier == 0:
            return self.link_latency_seconds + num_bytes / self.link_bytes_per_second
        return self.store_latency_seconds + num_bytes / self.store_bytes_per_second

    def _compute_seconds(self, num_bytes: int, num_tokens: int) -> float:
        arithmetic = 2 * (num_bytes / self.bytes_per_weight) * num_tokens / self.flops
        return max(num_bytes / self.memory_bytes_per_second, arithmetic)

    def layer_seconds(self, num_tokens: int) -> float:
        """Returns the time of a layer without its routed experts."""
        launches = KERNELS_PER_LAYER * self.kernel_seconds
        return launches + self._compute_seconds(self.layer_bytes, num_tokens)

    def expert_seconds(self, num_tokens: int) -> float:
        launches = KERNELS_PER_EXPERT * self.kernel_seconds
        return launches + self._compute_seconds(sum(self.chunk_bytes), num_tokens)

    def split_costs(self, num_tokens: int) -> SplitCosts:
        """Returns the costs of missed experts on both sides, where each has about `num_tokens`.

        The processor has the bandwidth of host memory that copies leave. A round trip over the link
        and a kernel's launch are the fixed cost of computing there.
        """
        num_bytes = sum(self.chunk_bytes)
        bandwidth = self.host_memory_bytes_per_second - self.link_bytes_per_second
        flops_per_token = 2 * num_bytes / self.bytes_per_weight
        computing = self.expert_seconds(num_tokens)
        return SplitCosts(
            copy_seconds=max(sum(map(self.transfer_seconds, self.chunk_bytes)), computing),
            copy_fixed=computing,
            host_seconds=lambda n: max(
                num_bytes / bandwidth, flops_per_token * n / self.host_flops
            ),
            host_fixed=2 * self.link_latency_seconds + self.kernel_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredHardware:
    """A measured machine: each time has a fixed part and one per token or byte."""

    name: str
    chunk_bytes: tuple[int, ...]
    transfer_fixed: float
    transfer_per_byte: float
    layer_fixed: float
    layer_per_token: float
    expert_fixed: float
    expert_per_token: float
    predictor_seconds: float
    """Latency of one prediction for one token by the kind that `predictor_latencies` names."""
    predictor_latencies: PredictorLatencies = PredictorLatencies()
    """Latencies of other kinds and of more tokens."""
    step_seconds: float = 0.0
    """Time of a decode step with all experts resident; the other times are parts of it."""
    overheads: Overheads = Overheads()

    def transfer_seconds(self, num_bytes: int, *, tier: int = 0) -> float:
        assert tier == 0, "only one tier is measured"
        return self.transfer_fixed + self.transfer_per_byte * num_bytes

    def layer_seconds(self, num_tokens: int) -> float:
        return self.layer_fixed + self.layer_per_token * num_tokens

    def expert_seconds(self, num_tokens: int) -> float:
        return self.expert_fixed + self.expert_per_token * num_tokens


Hardware = RooflineHardware | MeasuredHardware
"""The times that a replay needs, in seconds."""


def describe_hardware(config: HardwareConfig, shape: ShapeConfig) -> RooflineHardware:
    """Returns the described machine for experts of the shape's size.

    `shape=trace` must have been resolved to the model's own sizes (`profiling.shapes`).
    """
    assert not config.measured, config.name
    assert not shape.is_own, shape.name
    total_bytes = shape.num_layers * shape.num_experts * shape.expert_bytes
    latencies = nearest_latencies(
        config.predictor_kind,
        hidden_size=shape.hidden_size,
        num_experts=shape.num_layers * shape.num_experts,
    )
    return RooflineHardware(
        name=config.name,
        link_bytes_per_second=config.link_bytes_per_second,
        link_latency_seconds=config.link_latency_us * 1e-6,
        memory_bytes_per_second=config.memory_bytes_per_second,
        flops=config.flops,
        kernel_seconds=config.kernel_us * 1e-6,
        predictor_seconds=1e-6 * (config.predictor_us or latencies.measured_us),
        predictor_latencies=latencies,
        chunk_bytes=split_chunks(shape.expert_bytes),
        layer_bytes=shape.layer_bytes,
        bytes_per_weight=shape.bytes_per_weight,
        store_latency_seconds=config.store_latency_us * 1e-6,
        store_bytes_per_second=config.store_bytes_per_second or math.inf,
        host_memory_bytes_per_second=config.host_memory_bytes_per_second,
        host_flops=config.host_flops,
        host_share=config.host_bytes / total_bytes if config.host_bytes and total_bytes else 1.0,
    )


def hybrid_hardware(system: SystemConfig, hardware: Hardware) -> RooflineHardware | None:
    """Returns the hardware if the system computes misses in host memory, else None.

    Raises:
        MoecastError: The hardware describes no processor next to its accelerator, or one whose
            memory is no faster than the link.
    """
    if not system.hybrid:
        return None
    if (
        not isinstance(hardware, RooflineHardware)
        or hardware.host_memory_bytes_per_second <= hardware.link_bytes_per_second
        or hardware.host_flops <= 0
    ):
        raise MoecastError(
            f"system.hybrid=true: hardware={hardware.name} describes no host memory that computes; "
            "take hardware=rtx4090-pcie4, or set hardware.host_memory_bytes_per_second (above "
            "link_bytes_per_second) and hardware.host_flops"
        )
    return hardware


def split_chunks(num_bytes: int) -> tuple[int, ...]:
    """Splits an expert's bytes into `NUM_CHUNKS` sizes, as evenly as whole bytes allow."""
    return tuple((num_bytes + i) // NUM_CHUNKS for i in range(NUM_CHUNKS))


def prediction_seconds(hardware: Hardware, predictor: Predictor | None, requests_T: Ints) -> float:
    """Returns the time in which the predictor answers one event of a step of these requests.

    A kind without measured latencies takes as long as the machine's own kind does for one token.
    """
    if predictor is None:
        return 0.0
    num_rows = predictor.count_input_rows(requests_T)
    ratio = hardware.predictor_latencies.ratio(predictor.kind, num_rows)
    return hardware.predictor_seconds * ratio


def count_tier_slots(hardware: Hardware, slots: int, num_experts: int) -> list[int]:
    """Returns the slots of each tier, the computing one, of `slots`, first.

    Host memory is a second tier where it is too small for the shape: it then holds the same share
    of the `num_experts` that are replayed.
    """
    if not isinstance(hardware, RooflineHardware) or hardware.host_share >= 1.0:
        return [slots]
    return [slots, max(slots, int(hardware.host_share * num_experts))]
