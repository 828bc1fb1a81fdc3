"""The caches of several devices as one.

Every expert belongs to one device, which has separate tiers, queues and counters (MoE-Infinity,
request level, section 5.3: "for each GPU, we create an independent I/O thread"). Nothing is decided
here: events go to all devices, which ignore the experts of others; requests go to the expert's own.
"""

from collections.abc import Collection, Mapping, Sequence

from runtime.policy.cache import CacheEntry
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.policy.device_cache import DeviceCache, Techniques, order_computation
from runtime.policy.eviction.protocol import Expert, Probabilities
from runtime.policy.placement import ExpertPlacement
from runtime.policy.tier import CacheTier, TransferTask


class MultiDeviceCache:
    """The interface of a `DeviceCache` over those of several devices.

    Args:
        devices: The devices' caches, by number.
        placement: Experts of each device.
    """

    def __init__(self, devices: Sequence[DeviceCache], *, placement: ExpertPlacement):
        self.devices = tuple(devices)
        self._placement = placement

    def device_of(self, expert: Expert) -> DeviceCache:
        """Returns the cache of the device that computes the expert."""
        return self.devices[self._placement.device(expert)]

    @property
    def tiers(self) -> tuple[CacheTier, ...]:
        """Tiers of the first device, the computing one first, then those of the next."""
        return tuple(tier for device in self.devices for tier in device.tiers)

    @property
    def techniques(self) -> Techniques:
        """Techniques of all devices, which are alike."""
        return self.devices[0].techniques

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

    def total_counters(self) -> CacheCounters:
        """Returns the sum of all counters."""
        return sum_counters(self.counters)

    @property
    def num_slots(self) -> int:
        """Experts that fit in the computing tiers."""
        return sum(device.num_slots for device in self.devices)

    @property
    def pending_bytes(self) -> int:
        """Bytes fetched on predictions whose expert has not been requested yet."""
        return sum(device.pending_bytes for device in self.devices)

    # ---- lookups

    def is_ready(self, expert: Expert) -> bool:
        """Returns whether all chunks are in the computing tier."""
        return self.device_of(expert).is_ready(expert)

    def progress(self, expert: Expert) -> float:
        """Returns a number that is larger the sooner the expert is ready; -1 without a slot."""
        return self.device_of(expert).progress(expert)

    def entry(self, expert: Expert) -> CacheEntry | None:
        """Returns the expert's entry in the computing tier."""
        return self.device_of(expert).entry(expert)

    def requested_early(self, layer: int) -> Collection[int]:
        """Returns what `request_early` has requested in a layer that is not fully routed yet."""
        return [e for device in self.devices for e in device.requested_early(layer)]

    # ---- events and requests of a layer

    def begin_step(self, *, new_request: bool) -> None:
        """Starts a forward pass; `new_request`: it is the first of a request."""
        for device in self.devices:
            device.begin_step(new_request=new_request)

    def end_step(self) -> None:
        """Ends the forward pass."""
        for device in self.devices:
            device.end_step()

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        """Passes a predictor's probabilities for a layer to the eviction policies."""
        for device in self.devices:
            device.on_forecast(layer, probability_E)

    def on_reuse_scores(self, layer: int, score_E: Probabilities) -> None:
        """Passes scores of the layer's experts after this step to the eviction policies."""
        for device in self.devices:
            device.on_reuse_scores(layer, score_E)

    def prefetch(self, layer: int, experts: Sequence[int], priorities: Sequence[float]) -> None:
        """Requests predicted experts, the most important first."""
        for device in self.devices:
            device.prefetch(layer, experts, priorities)

    def set_idle_prefetch(self, on: bool) -> None:
        """Sets whether idle links fetch the experts with the highest scores."""
        for device in self.devices:
            device.set_idle_prefetch(on)

    def request_early(self, layer: int, experts: Collection[int]) -> list[int]:
        """Requests what some of the step's tokens are routed to before the others; the new ones."""
        return [e for device in self.devices for e in device.request_early(layer, experts)]

    def request_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> list[int]:
        """Requests what the router has chosen; returns the computing order over all devices."""
        for device in self.devices:
            device.request_routed(layer, tokens_per_expert)
        return order_computation(
            self.techniques, tokens_per_expert, lambda e: self.progress((layer, e))
        )

    def cancel(self, layer: int, experts: Sequence[int]) -> None:
        """Ends the requests of experts that are not going to be computed."""
        for device in self.devices:
            device.cancel(layer, experts)

    # ---- requests of one expert

    def request(self, expert: Expert) -> None:
        """Requests the expert that is computed next, where its layer was not requested at once."""
        self.device_of(expert).request(expert)

    def make_room(self, layer: int, expert: int, coming: Sequence[int]) -> bool:
        """Makes the expert the next to be computed; returns whether it requested anything new."""
        return self.device_of((layer, expert)).make_room(layer, expert, coming)

    def release(self, expert: Expert) -> None:
        """Ends the request of an expert that has been computed."""
        self.device_of(expert).release(expert)

    # ---- the whole cache

    def fill_lower_tiers(self, num_experts: int) -> None:
        """Fills the tiers below the computing ones with the first layers' experts."""
        for device in self.devices:
            device.fill_lower_tiers(num_experts)

    def repair(self, transfers: Sequence[Collection[TransferTask]]) -> None:
        """Restores consistency; `transfers` are those running into each of `tiers`."""
        rest = list(transfers)
        for device in self.devices:
            device.repair(rest[: len(device.tiers)])
            del rest[: len(device.tiers)]


DeviceCaches = DeviceCache | MultiDeviceCache
"""The cache of one device or of several: what the engine and the simulator run on."""
