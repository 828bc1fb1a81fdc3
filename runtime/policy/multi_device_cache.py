"""The caches of several devices as one.

Every expert belongs to one device, which has separate tiers, queues and counters (MoE-Infinity,
request level, section 5.3: "for each GPU, we create an independent I/O thread"). Nothing is decided
here: events go to all devices, which ignore the experts of others; requests go to the expert's own.
"""

from collections.abc import Collection, Mapping, Sequence

from predictors.base import Ints
from runtime.config import SystemConfig
from runtime.policy.cache import CacheEntry
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.policy.device_cache import DeviceCache, order_computation
from runtime.policy.eviction.protocol import Expert, Probabilities
from runtime.policy.placement import ExpertPlacement
from runtime.policy.tier import CacheTier


class MultiDeviceCache:
    """The interface of a `DeviceCache` over those of several devices, by number."""

    def __init__(self, devices: Sequence[DeviceCache], *, placement: ExpertPlacement):
        self.devices = tuple(devices)
        self._placement = placement

    def device_of(self, expert: Expert) -> DeviceCache:
        return self.devices[self._placement.device(expert)]

    @property
    def tiers(self) -> tuple[CacheTier, ...]:
        """Tiers of the first device, the computing one first, then those of the next."""
        return tuple(tier for device in self.devices for tier in device.tiers)

    @property
    def system(self) -> SystemConfig:
        return self.devices[0].system

    # ---- counters and sizes

    @property
    def counters(self) -> list[CacheCounters]:
        """Counters of each layer, summed over the devices."""
        # A replay lets all devices count into the same ones.
        distinct = {id(device.counters): device.counters for device in self.devices}
        return [sum_counters(layers) for layers in zip(*distinct.values(), strict=True)]

    @counters.setter
    def counters(self, counters: list[CacheCounters]) -> None:
        for device in self.devices:
            device.counters = counters

    @property
    def num_slots(self) -> int:
        return sum(device.num_slots for device in self.devices)

    @property
    def pending_bytes(self) -> int:
        return sum(device.pending_bytes for device in self.devices)

    # ---- lookups

    @property
    def is_complete(self) -> bool:
        """Whether every expert is in the computing tier of its device, to stay."""
        return all(device.is_complete for device in self.devices)

    @property
    def layer_now(self) -> int:
        return self.devices[0].layer_now

    def owns(self, expert: Expert) -> bool:  # noqa: ARG002
        """Returns True: every expert is on one of the devices."""
        return True

    def is_ready(self, expert: Expert) -> bool:
        return self.device_of(expert).is_ready(expert)

    def first_ready(self, layer: int, experts: Sequence[int]) -> int | None:
        return next((e for e in experts if self.is_ready((layer, e))), None)

    def progress(self, expert: Expert) -> float:
        return self.device_of(expert).progress(expert)

    def entry(self, expert: Expert) -> CacheEntry | None:
        return self.device_of(expert).entry(expert)

    def requested_early(self, layer: int) -> Collection[int]:
        return [e for device in self.devices for e in device.requested_early(layer)]

    # ---- events and requests of a layer

    def begin_step(self, requests_T: Ints) -> None:
        for device in self.devices:
            device.begin_step(requests_T)

    def end_step(self) -> None:
        for device in self.devices:
            device.end_step()

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        for device in self.devices:
            device.on_tokens_routed(layer, experts_TK)

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        for device in self.devices:
            device.on_forecast(layer, probability_E)

    def on_reuse_scores(self, layer: int, score_1E: Probabilities) -> None:
        for device in self.devices:
            device.on_reuse_scores(layer, score_1E)

    def prefetch(
        self,
        layer: int,
        experts: Sequence[int],
        probabilities: Sequence[float],
        named: Sequence[int] | None = None,
    ) -> None:
        for device in self.devices:
            device.prefetch(layer, experts, probabilities, named=named)

    def set_idle_prefetch(self, on: bool) -> None:
        for device in self.devices:
            device.set_idle_prefetch(on)

    def request_early(self, layer: int, experts: Collection[int]) -> list[int]:
        return [e for device in self.devices for e in device.request_early(layer, experts)]

    def displace_early(self, layer: int) -> bool:
        return any([device.displace_early(layer) for device in self.devices])

    def request_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> list[int]:
        for device in self.devices:
            device.request_routed(layer, tokens_per_expert)
        return order_computation(
            self.system, tokens_per_expert, lambda e: self.progress((layer, e))
        )

    def count_routed(self, layer: int, experts: Collection[int]) -> None:
        for device in self.devices:
            device.count_routed(layer, experts)

    def cancel(self, layer: int, experts: Sequence[int]) -> None:
        for device in self.devices:
            device.cancel(layer, experts)

    # ---- requests of one expert

    def next_candidates(self, layer: int, pending: Sequence[int]) -> Sequence[int]:
        system = self.system
        if system.early_preemption and system.reordered:
            return pending
        self.make_room(layer, pending[0], pending)
        return pending[:1]

    def request(self, expert: Expert) -> None:
        self.device_of(expert).request(expert)

    def make_room(self, layer: int, expert: int, coming: Sequence[int]) -> None:
        self.device_of((layer, expert)).make_room(layer, expert, coming)

    def release(self, expert: Expert) -> None:
        self.device_of(expert).release(expert)

    # ---- the whole cache

    def first_experts(self) -> list[list[Expert]]:
        """Returns the experts that each of `tiers` begins with."""
        return [tier for device in self.devices for tier in device.first_experts()]

    def fill_when_idle(self) -> None:
        for device in self.devices:
            device.fill_when_idle()

    def fill(self) -> None:
        for device in self.devices:
            device.fill()

    def reset(self, lost_slots: Sequence[Collection[int]]) -> None:
        """Keeps what has fully arrived; `lost_slots` are those of each of `tiers`."""
        rest = list(lost_slots)
        for device in self.devices:
            device.reset(rest[: len(device.tiers)])
            del rest[: len(device.tiers)]


DeviceCaches = DeviceCache | MultiDeviceCache
"""The cache of one device or of several: what the engine and the simulator run on."""
