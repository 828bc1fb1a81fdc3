"""Several devices, in one machine or in several, as one simulated machine.

Experts are spread over the devices by `runtime.policy.placement`. Each device is a `Simulator` over
the same device cache as in a live run; between two layers all clocks are set to the latest one.
Tokens travel to the devices of their experts and back (expert parallelism; MoE-Infinity, sequence
level, section 7), requests are divided evenly among the machines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictors.base import Forecasts
from predictors.errors import MoecastError
from runtime.policy.device_cache import DeviceCache
from runtime.sim.hardware import Hardware, RooflineHardware
from runtime.sim.simulator import Simulator


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

    def connect(
        self, simulators: Sequence[Simulator], devices: Sequence[DeviceCache]
    ) -> "SimulatedCluster":
        """Returns the devices as one simulated machine."""
        return SimulatedCluster(simulators, devices, self)

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
    devices: Sequence[DeviceCache]
    interconnect: Interconnect
    stall_seconds: float = 0.0
    """Sum over the layers of the longest time that a device waited for experts."""

    @property
    def now(self) -> float:
        return self.simulators[0].now

    @property
    def predictor_seconds(self) -> float:
        return self.simulators[0].predictor_seconds

    def begin_step(self) -> None:
        for simulator in self.simulators:
            simulator.begin_step()

    def forecast(self, forecasts: Forecasts, *, layer_now: int, seconds: float) -> None:
        for simulator in self.simulators:
            simulator.forecast(forecasts, layer_now=layer_now, seconds=seconds)

    def forecast_after_requests(
        self, forecasts: Forecasts, *, layer_now: int, seconds: float
    ) -> None:
        for simulator in self.simulators:
            simulator.forecast_after_requests(forecasts, layer_now=layer_now, seconds=seconds)

    def score_reuse(self, seconds: float, *, is_awaited: bool) -> None:
        for simulator in self.simulators:
            simulator.score_reuse(seconds, is_awaited=is_awaited)

    def compute(self, seconds: float) -> None:
        """Computes on all devices, or lets them wait for one that computes."""
        for simulator in self.simulators:
            simulator.compute(seconds)

    def start_load(self, num_bytes: int) -> None:
        """Starts a load of each device's share."""
        for simulator in self.simulators:
            simulator.start_load(-(-num_bytes // len(self.simulators)))

    def finish_load(self) -> None:
        for simulator in self.simulators:
            simulator.finish_load()
        last = max(simulator.now for simulator in self.simulators)
        for simulator in self.simulators:
            simulator.compute(last - simulator.now)

    def run_experts_by_batch(self, layer: int, batches: Sequence[dict[int, int]]) -> None:
        raise MoecastError(
            f"layer {layer}, {len(batches)} micro-batches: experts that are computed batch by "
            "batch are simulated on one device only"
        )

    def run_experts(self, layer: int, tokens_per_expert: dict[int, int]) -> None:
        """Computes each device's experts; the layer ends when the last tokens are back."""
        ends, stalls = [], []
        for simulator, device in zip(self.simulators, self.devices, strict=True):
            own = {e: n for e, n in tokens_per_expert.items() if device.owns((layer, e))}
            travel = self.interconnect.travel_seconds(sum(own.values()))
            stalled = simulator.stall_seconds
            # Experts are fetched as soon as the router has run, while tokens travel.
            simulator.run_experts(layer, own, computed_after=travel)
            stalls.append(simulator.stall_seconds - stalled)
            ends.append(simulator.now + travel)
        self.stall_seconds += max(stalls)
        for simulator in self.simulators:
            simulator.compute(max(ends) - simulator.now)
