"""Several devices, in one machine or in several, as one simulated machine.

Experts are spread over the devices by `runtime.policy.placement`. Each device is a `Simulator` of
its own, over the policy core that the live runtime gives to a device; between two layers their
clocks are set to the latest. Tokens travel to the devices of their experts and back (expert
parallelism; moe-infinity-sequence-level 7), requests are divided evenly among the machines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictors.base import Floats, Forecasts
from runtime.policy.device_cache import DeviceCache
from runtime.sim.hardware import Hardware, Roofline
from runtime.sim.simulator import Simulator


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Devices, and what hidden states travel over between them."""

    num_nodes: int = 1
    devices_per_node: int = 1
    token_bytes: int
    """One token's hidden state."""
    device_latency_seconds: float = 10e-6
    """Between two devices of a machine; as a copy over PCIe (`configs/hardware/rtx4090-pcie4`)."""
    device_bytes_per_second: float = 32e9
    node_latency_seconds: float = 0.0
    """Between two machines."""
    node_bytes_per_second: float = math.inf

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def travel_seconds(self, num_tokens: int) -> float:
        """Until the states of tokens from all machines alike are at one device, or back.

        Of all tokens, 1/nodes come from the device's own machine, and of these 1/devices from
        itself. What comes over one link comes in one message.
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
        """Of a step, those that one machine computes outside of experts."""
        return math.ceil(num_tokens / self.num_nodes)

    def of_device(self, hardware: Hardware) -> Hardware:
        """The machine as one of its devices has it: disk and host memory are shared, and hold the
        experts of this machine's devices only.
        """
        if not isinstance(hardware, Roofline):
            return hardware
        holds_all = hardware.host_share * self.num_nodes >= 1.0
        return replace(
            hardware,
            store_bytes_per_second=hardware.store_bytes_per_second / self.devices_per_node,
            host_share=1.0 if holds_all else hardware.host_share / self.devices_per_node,
        )


class Cluster:
    """Takes a step's events as a `Simulator` does."""

    def __init__(
        self,
        simulators: Sequence[Simulator],
        shards: Sequence[DeviceCache],
        interconnect: Interconnect,
    ):
        self._simulators = tuple(simulators)
        self._shards = tuple(shards)
        self._interconnect = interconnect
        self.stall_seconds = 0.0
        """Time that the devices waited for experts, of each layer the longest."""

    @property
    def now(self) -> float:
        """The clock of all devices, between events."""
        return self._simulators[0].now

    @property
    def predictor_seconds(self) -> float:
        """Charged to predictions, which one device makes for all."""
        return self._simulators[0].predictor_seconds

    def begin_step(self) -> None:
        for simulator in self._simulators:
            simulator.begin_step()

    def forecast(self, forecasts: Forecasts, *, layer_now: int) -> None:
        for simulator in self._simulators:
            simulator.forecast(forecasts, layer_now=layer_now)

    def compute(self, seconds: float) -> None:
        """All devices compute, or wait for one that does."""
        for simulator in self._simulators:
            simulator.compute(seconds)

    def valued(self, layer: int, value_E: Floats) -> None:
        for simulator in self._simulators:
            simulator.valued(layer, value_E)

    def run_experts(self, layer: int, tokens_per_expert: dict[int, int]) -> None:
        """Each device on its own experts; the layer is over when the last one's tokens are back."""
        ends, stalls = [], []
        for simulator, shard in zip(self._simulators, self._shards, strict=True):
            own = {e: n for e, n in tokens_per_expert.items() if shard.owns((layer, e))}
            travel = self._interconnect.travel_seconds(sum(own.values()))
            stalled = simulator.stall_seconds
            # Experts are fetched as soon as the router has spoken, while tokens travel.
            simulator.run_experts(layer, own, computed_after=travel)
            stalls.append(simulator.stall_seconds - stalled)
            ends.append(simulator.now + travel)
        self.stall_seconds += max(stalls)
        for simulator in self._simulators:
            simulator.compute(max(ends) - simulator.now)
