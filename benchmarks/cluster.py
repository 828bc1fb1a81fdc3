"""Several devices, in one machine or in several, as one simulated machine.

Experts are spread over the devices by `runtime.policy.placement`. Each device is a `Simulator` over
the same device cache as in a live run; between two layers all clocks are set to the latest one.
Tokens travel to the devices of their experts and back (expert parallelism; MoE-Infinity, sequence
level, section 7), requests are divided evenly among the machines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictors.base import Forecasts, Ints
from predictors.errors import MoecastError
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.counters import CacheCounters
from runtime.policy.device_cache import count_tokens
from runtime.policy.placement import ExpertPlacement
from runtime.sim.hardware import Hardware, RooflineHardware
from runtime.sim.simulator import Simulator, make_simulator
from runtime.sim.step import RecordedStep
from runtime.transfer.loop import TimelineSink


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Number of devices, and the links between them that hidden states travel over."""

    num_nodes: int = 1
    devices_per_node: int = 1
    token_bytes: int
    """Bytes of one token's hidden state."""
    device_latency_seconds: float = 10e-6
    """Latency between two devices of a machine; a copy over PCIe, as in
    `configs/hardware/rtx4090-pcie4`."""
    device_bytes_per_second: float = 32e9
    node_latency_seconds: float = 0.0
    """Latency between two machines."""
    node_bytes_per_second: float = math.inf

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def travel_seconds(self, num_tokens: int) -> float:
        """Returns the time for the states of `num_tokens` tokens to reach their device, or back.

        The tokens come from all machines evenly: 1/nodes from the device's machine, and of these
        1/devices from itself. All that comes over one link is one message.
        """
        from_nodes = 1 - 1 / self.num_nodes
        from_devices = (1 - from_nodes) * (1 - 1 / self.devices_per_node)
        seconds = 0.0
        if num_tokens and from_nodes:
            num_bytes = num_tokens * from_nodes * self.token_bytes
            seconds += self.node_latency_seconds + num_bytes / self.node_bytes_per_second
        if num_tokens and from_devices:
            num_bytes = num_tokens * from_devices * self.token_bytes
            seconds += self.device_latency_seconds + num_bytes / self.device_bytes_per_second
        return seconds

    def tokens_at_once(self, num_tokens: int) -> int:
        """Returns the tokens of a step that one machine computes outside of experts."""
        return math.ceil(num_tokens / self.num_nodes)

    def make_machine(
        self,
        system: SystemConfig,
        spec: ModelSpec,
        hardware: Hardware,
        *,
        budget_slots: int | Sequence[int],
        timeline: TimelineSink | None = None,
        is_stateless: bool = False,
    ) -> "SimulatedCluster":
        """Returns the devices as one simulated machine.

        Its timeline is that of the first device.
        """
        if system.hybrid:
            raise MoecastError("system.hybrid=true: replays simulate it on one device only")
        if system.adaptive:
            raise MoecastError("system.adaptive=true: replays decide it on one device only")
        simulators = [
            make_simulator(
                system,
                spec,
                self.device_hardware(hardware),
                budget_slots=budget_slots,
                placement=ExpertPlacement(self.num_devices),
                device=device,
                timeline=None if device else timeline,
                is_stateless=is_stateless,
            )
            for device in range(self.num_devices)
        ]
        return SimulatedCluster(simulators, self)

    def device_hardware(self, hardware: Hardware) -> Hardware:
        """Returns one device's part of a machine, whose disk and host memory its devices share.

        They hold the experts of this machine's devices only.
        """
        if not isinstance(hardware, RooflineHardware):
            return hardware
        holds_all = hardware.host_share * self.num_nodes >= 1.0
        return replace(
            hardware,
            store_bytes_per_second=hardware.store_bytes_per_second / self.devices_per_node,
            host_share=1.0 if holds_all else hardware.host_share / self.devices_per_node,
        )


@dataclass(eq=False)
class SimulatedCluster:
    """The interface of a `Simulator` over several devices."""

    simulators: Sequence[Simulator]
    interconnect: Interconnect
    stall_seconds: float = 0.0
    """Sum over the layers of the longest time that a device waited for experts."""
    payoff = None
    uses_forecasts = predicts_reuse = True

    @property
    def now(self) -> float:
        return self.simulators[0].now

    @property
    def predictor_seconds(self) -> float:
        return self.simulators[0].predictor_seconds

    def begin_step(self, requests_T: Ints, counters: list[CacheCounters]) -> None:
        for simulator in self.simulators:
            simulator.begin_step(requests_T, counters)

    def end_step(self) -> None:
        for simulator in self.simulators:
            simulator.end_step()

    def forecast(self, forecasts: Forecasts, *, layer_now: int, seconds: float) -> None:
        for simulator in self.simulators:
            simulator.forecast(forecasts, layer_now=layer_now, seconds=seconds)

    def forecast_after_requests(
        self, forecasts: Forecasts, *, layer_now: int, seconds: float
    ) -> None:
        for simulator in self.simulators:
            simulator.forecast_after_requests(forecasts, layer_now=layer_now, seconds=seconds)

    def run_dense(self, step: RecordedStep, layer: int) -> None:  # noqa: ARG002
        """Computes a layer without its experts on all devices, of each machine's tokens."""
        num_tokens = self.interconnect.tokens_at_once(len(step.tokens_T))
        for simulator in self.simulators:
            simulator.compute(simulator.layer_seconds(num_tokens))

    def run_routed(
        self, step: RecordedStep, layer: int, scores: Forecasts, score_seconds: float
    ) -> None:
        """Runs a layer from its router's choice on; scores come first if a device evicts."""
        experts_TK, spec = step.experts(layer), self.simulators[0].spec
        chosen = count_tokens(experts_TK, spec.num_experts)
        caches = [simulator.cache for simulator in self.simulators]
        is_awaited = bool(scores) and any(cache.lacks(layer, chosen) for cache in caches)
        for simulator in self.simulators:
            if scores:
                simulator.charge_scores(score_seconds, is_awaited=is_awaited)
        for simulator in self.simulators:
            if is_awaited:
                simulator.give_scores(scores)
            simulator.cache.on_tokens_routed(layer, experts_TK)
        self.run_experts(layer, chosen)
        for simulator in self.simulators:
            if not is_awaited:
                simulator.give_scores(scores)

    def run_experts(self, layer: int, tokens_per_expert: dict[int, int]) -> None:
        """Computes each device's experts; the layer ends when the last tokens are back."""
        ends, stalls = [], []
        for simulator in self.simulators:
            own = {e: n for e, n in tokens_per_expert.items() if simulator.cache.owns((layer, e))}
            travel = self.interconnect.travel_seconds(sum(own.values()))
            stalled = simulator.stall_seconds
            # Experts are fetched as soon as the router has run, while tokens travel.
            simulator.run_experts(layer, own, computed_after=travel)
            stalls.append(simulator.stall_seconds - stalled)
            ends.append(simulator.now + travel)
        self.stall_seconds += max(stalls)
        for simulator in self.simulators:
            simulator.compute(max(ends) - simulator.now)
