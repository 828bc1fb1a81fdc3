"""One policy core for each of several devices, and all of them as one.

Every expert belongs to one device, which has tiers, a queue and counters of its own
(moe-infinity-request 5.3: "for each GPU, we create an independent I/O thread"). Nothing is decided
here: each device's core is told of what concerns its own experts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np

from runtime.policy.cache import Entry
from runtime.policy.counters import Counters, added
from runtime.policy.eviction import Expert, Probabilities
from runtime.policy.placement import Placement
from runtime.policy.prefetcher import Prefetcher, Techniques, computing_order
from runtime.policy.tier import Task, Tier

Value = TypeVar("Value")


class Shard(Prefetcher):
    """One device's core: hears of all experts and minds its own."""

    def __init__(
        self, tiers: Sequence[Tier], *, techniques: Techniques, placement: Placement, device: int
    ):
        super().__init__(tiers, techniques=techniques)
        self._placement = placement
        self._device = device

    def owns(self, expert: Expert) -> bool:
        """Whether the expert is this device's."""
        return self._placement.device(expert) == self._device

    def _own(self, layer: int, experts: Sequence[int]) -> list[int]:
        return [e for e in experts if self.owns((layer, e))]

    def _masked(self, layer: int, value_E: Probabilities) -> Probabilities:
        """0 for what is not here: an eviction policy must not wish for it."""
        return np.where(self._placement.mask(layer, self._device, len(value_E)), value_E, 0.0)

    def forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        super().forecast(layer, list(self._masked(layer, probability_E)))

    def valued(self, layer: int, value_E: Probabilities) -> None:
        super().valued(layer, self._masked(layer, value_E))

    def predicted(self, layer: int, experts: Sequence[int], priority: Sequence[float]) -> None:
        pairs = zip(experts, priority, strict=True)
        own = [(e, urgent) for e, urgent in pairs if self.owns((layer, e))]
        super().predicted(layer, [e for e, _ in own], [urgent for _, urgent in own])

    def partly_routed(self, layer: int, experts: Collection[int]) -> list[int]:
        return super().partly_routed(layer, self._own(layer, list(experts)))

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> list[int]:
        own = self._own(layer, list(tokens_per_expert))
        return super().routed(layer, {e: tokens_per_expert[e] for e in own})

    def make_room(self, layer: int, expert: int, coming: Sequence[int]) -> bool:
        return super().make_room(layer, expert, self._own(layer, coming))

    def abandon(self, layer: int, experts: Sequence[int]) -> None:
        super().abandon(layer, self._own(layer, experts))

    def fill(self, num_experts: int) -> None:
        for tier in self.tiers[1:]:
            tier.fill(num_experts, owns=self.owns)


class Shards(Prefetcher):
    """The devices' cores, for whoever sees one model: engine, planner and keeper.

    `tiers` are those of the first device, the computing one first, then those of the next.
    """

    def __init__(self, shards: Sequence[Shard], *, placement: Placement):
        tiers = [tier for shard in shards for tier in shard.tiers]
        super().__init__(tiers, techniques=shards[0].techniques)
        self.shards = tuple(shards)
        self._placement = placement

    def of(self, expert: Expert) -> Shard:
        """The core of the expert's device."""
        return self.shards[self._placement.device(expert)]

    def entry(self, expert: Expert) -> Entry | None:
        return self.of(expert).entry(expert)

    def is_ready(self, expert: Expert) -> bool:
        return self.of(expert).is_ready(expert)

    def progress(self, expert: Expert) -> float:
        return self.of(expert).progress(expert)

    # ---- the run's events: every device hears of them

    def begin_step(self, *, new_request: bool) -> None:
        self._each(lambda shard: shard.begin_step(new_request=new_request))

    def end_step(self) -> None:
        self._each(Shard.end_step)

    def idle_prefetch(self, on: bool) -> None:
        self._each(lambda shard: shard.idle_prefetch(on))

    def fill(self, num_experts: int) -> None:
        self._each(lambda shard: shard.fill(num_experts))

    def forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        self._each(lambda shard: shard.forecast(layer, probability_E))

    def valued(self, layer: int, value_E: Probabilities) -> None:
        self._each(lambda shard: shard.valued(layer, value_E))

    def predicted(self, layer: int, experts: Sequence[int], priority: Sequence[float]) -> None:
        self._each(lambda shard: shard.predicted(layer, experts, priority))

    def partly_routed(self, layer: int, experts: Collection[int]) -> list[int]:
        asked = self._each(lambda shard: shard.partly_routed(layer, experts))
        return [e for one in asked for e in one]

    def early(self, layer: int) -> Collection[int]:
        return [e for shard in self.shards for e in shard.early(layer)]

    def cancel(self, layer: int) -> None:
        self._each(lambda shard: shard.cancel(layer))

    def abandon(self, layer: int, experts: Sequence[int]) -> None:
        self._each(lambda shard: shard.abandon(layer, experts))

    def repair(self, under_way: Sequence[Collection[Task]]) -> None:
        """`under_way` as `tiers` are ordered."""
        left = list(under_way)
        for shard in self.shards:
            shard.repair(left[: len(shard.tiers)])
            del left[: len(shard.tiers)]

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> list[int]:
        """The order in which to compute over all devices: as for one, by what has arrived."""
        self._each(lambda shard: shard.routed(layer, tokens_per_expert))
        return computing_order(
            self.techniques, tokens_per_expert, lambda e: self.progress((layer, e))
        )

    # ---- one expert: its device hears of it

    def demand(self, expert: Expert) -> None:
        self.of(expert).demand(expert)

    def make_room(self, layer: int, expert: int, coming: Sequence[int]) -> bool:
        return self.of((layer, expert)).make_room(layer, expert, coming)

    def used(self, expert: Expert) -> None:
        self.of(expert).used(expert)

    # ---- counters

    @property
    def counters(self) -> list[Counters]:
        """Of each layer, the devices' added up."""
        # A replay lets them all count into the same ones.
        own = {id(shard.counters): shard.counters for shard in self.shards}
        return [added(layers) for layers in zip(*own.values(), strict=True)]

    @counters.setter
    def counters(self, counters: list[Counters]) -> None:
        for shard in self.shards:
            shard.counters = counters

    @property
    def num_slots(self) -> int:
        return sum(shard.num_slots for shard in self.shards)

    @property
    def pending_bytes(self) -> int:
        return sum(shard.pending_bytes for shard in self.shards)

    def total(self) -> Counters:
        return added(self.counters)

    def _each(self, tell: Callable[[Shard], Value]) -> list[Value]:
        return [tell(shard) for shard in self.shards]
