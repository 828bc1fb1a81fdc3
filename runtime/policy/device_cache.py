"""The cache of one device: ProMoE, algorithm 2, over its tiers, and the order of computation."""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from predictors.base import Ints
from runtime.config import SystemConfig
from runtime.policy.cache import CacheEntry
from runtime.policy.counters import CacheCounters
from runtime.policy.eviction.protocol import Expert, Probabilities
from runtime.policy.placement import ExpertPlacement
from runtime.policy.tier import CacheTier

NOTHING_EARLY: Mapping[int, bool] = MappingProxyType({})


def order_computation(
    system: SystemConfig,
    tokens_per_expert: Mapping[int, int],
    progress: Callable[[int], float] | None,
) -> list[int]:
    """Returns a layer's experts in the order in which to compute them.

    Resident experts come first, then those in flight by the chunks that have arrived, then missing
    ones (ProMoE, section 5.3); without reordering by id, or by the number of their tokens.
    `progress` is None where all are resident.
    """
    order = sorted(tokens_per_expert)
    if system.hot_first:
        order.sort(key=tokens_per_expert.__getitem__, reverse=True)
    if system.reordered and progress is not None:
        order.sort(key=progress, reverse=True)
    return order


class DeviceCache:
    """Decides in which order a layer's experts are requested and computed on one device.

    Every method is given all experts of a layer; those that the placement assigns to other devices
    are ignored. One thread calls it.

    Args:
        tiers: The computing tier, then the one below it, and so on.
        num_experts: Most experts of a layer, those of other devices included.
        system: What to request and in which order (ProMoE, figure 12; MoE-Infinity; Klotski).
        placement: Experts of each device; None: all experts are on this one.
        device: Number of this device in the placement.
    """

    def __init__(
        self,
        tiers: Sequence[CacheTier],
        *,
        num_experts: int,
        system: SystemConfig,
        placement: ExpertPlacement | None = None,
        device: int = 0,
    ):
        self.tiers = tuple(tiers)
        self.top = self.tiers[0]
        self.system = system
        self._early_preemption = system.early_preemption
        self._reordered = system.reordered
        self._cancel_outdated = system.cancel
        self._drop_used = system.drop_used
        self._placement = placement
        self._device = device
        self._num_experts = num_experts
        num_layers = len(self.top.counters)
        self._num_owned = (placement or ExpertPlacement()).num_owned(
            device, num_layers=num_layers, num_experts=num_experts
        )
        self._predicted: dict[int, dict[int, bool]] = {}
        """Experts predicted for each layer since it was last routed, and whether each was resident
        then without a prediction having fetched it."""
        self.layer_now = -1
        """The last layer whose router has run; -1 when a step begins."""
        self._early: dict[int, dict[int, bool]] = {}
        """Experts of each layer that some of the step's tokens were routed to before the others
        reached the layer, and whether they were ready then."""
        self._displaced: set[int] = set()
        """Layers of `_early` whose requests were ended, as an earlier layer needs the slots."""
        self._pinned_early: dict[int, list[int]] = {}
        """Experts of these layers that keep their slot though no router has requested them yet."""

    # ---- ownership

    def owns(self, expert: Expert) -> bool:
        return self._placement is None or self._placement.device(expert) == self._device

    def _own(self, layer: int, experts: Collection[int]) -> Collection[int]:
        if self._placement is None:
            return experts
        return [e for e in experts if self.owns((layer, e))]

    def _mask(self, layer: int, value_E: Probabilities) -> Probabilities:
        """Returns 0 for other devices' experts: the eviction policy must not fetch them."""
        if self._placement is None:
            return value_E
        mask_E = self._placement.mask(layer, self._device, np.shape(value_E)[-1])
        return np.where(mask_E, value_E, 0.0)

    # ---- counters and sizes

    @property
    def counters(self) -> list[CacheCounters]:
        return self.top.counters

    @counters.setter
    def counters(self, counters: list[CacheCounters]) -> None:
        self.top.counters = counters

    @property
    def num_slots(self) -> int:
        return self.top.cache.num_slots

    @property
    def pending_bytes(self) -> int:
        """Bytes fetched on predictions whose expert has not been requested yet."""
        entries = list(self.top.cache.entries.values())  # any thread may ask
        return sum([entry.speculative_bytes for entry in entries])

    # ---- lookups

    @property
    def is_complete(self) -> bool:
        """Whether all of the device's experts are in the computing tier to stay.

        From then on every request is a hit and nothing is fetched or evicted, so that forecasts,
        reuse scores and routing make no difference: `count_routed` is all that a layer needs.
        """
        return self.top.num_ready == self._num_owned and not self._drop_used

    def is_ready(self, expert: Expert) -> bool:
        return self.top.is_ready(expert)

    def first_ready(self, layer: int, experts: Sequence[int]) -> int | None:
        """Returns the first of a layer's experts that is ready; None: none is."""
        return self.top.first_ready(layer, experts)

    def progress(self, expert: Expert) -> float:
        return self.top.progress(expert)

    def entry(self, expert: Expert) -> CacheEntry | None:
        return self.top.cache.entries.get(expert)

    def requested_early(self, layer: int) -> Collection[int]:
        """Returns what `request_early` has requested in a layer that is not fully routed yet."""
        return self._early.get(layer, ())

    # ---- events of a step

    def _advance(self, layer_now: int) -> None:
        """Orders queued prefetches by their distance from the layer whose router has run."""
        self.layer_now = layer_now
        for tier in self.tiers:
            tier.queue.advance(layer_now)

    def _changing_tiers(self) -> Sequence[CacheTier]:
        """Returns the tiers that may still evict something; other policies need no events."""
        is_complete = self.top.num_ready == self._num_owned and not self._drop_used
        return self.tiers[1:] if is_complete else self.tiers

    def begin_step(self, requests_T: Ints) -> None:
        self._cancel_early()
        self._advance(-1)
        for tier in self._changing_tiers():
            tier.cache.begin_step(requests_T)

    def end_step(self) -> None:
        self._cancel_early()
        for tier in self._changing_tiers():
            tier.cache.end_step()

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        for tier in self._changing_tiers():
            tier.cache.on_tokens_routed(layer, experts_TK)

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        for tier in self._changing_tiers():
            tier.cache.on_forecast(layer, self._mask(layer, probability_E))

    def on_reuse_scores(self, layer: int, score_1E: Probabilities) -> None:
        for tier in self._changing_tiers():
            tier.cache.on_reuse_scores(layer, self._mask(layer, score_1E))

    # ---- predictions

    def prefetch(
        self,
        layer: int,
        experts: Sequence[int],
        probabilities: Sequence[float],
        named: Sequence[int] | None = None,
    ) -> None:
        """Requests predicted experts, the most important first (PushPredictedExperts).

        Experts beyond the layer's share of the cache are not queued: they would only evict those
        predicted before them.

        Args:
            layer: The experts' layer.
            experts: Experts to fetch.
            probabilities: The importance of each, at most 1.
            named: Experts that the forecast names, for the counters; None: `experts`.
        """
        assert len(experts) == len(probabilities), (experts, probabilities)
        named_experts: Collection[int] = experts if named is None else named
        if self._placement is not None:
            own = [i for i, e in enumerate(experts) if self.owns((layer, e))]
            experts, probabilities = [experts[i] for i in own], [probabilities[i] for i in own]
            named_experts = self._own(layer, named_experts)
        predicted = self._predicted.get(layer)
        if predicted is None:
            predicted = self._predicted[layer] = {}
        if self._cancel_outdated:
            self.top.cancel_prefetches(layer, set(experts))
            predicted.clear()
        top = self.top
        for e in named_experts:
            if e not in predicted:
                expert = layer, e
                entry = top.cache.entries.get(expert)
                is_known = entry is not None and not entry.speculative_bytes
                predicted[e] = is_known and top.is_ready(expert)
        share = top.cache.share(layer)
        if len(experts) > share:
            experts = experts[:share]
        top.prefetch_all(layer, experts, probabilities)

    def set_idle_prefetch(self, on: bool) -> None:
        """Sets whether idle links fetch the experts with the highest scores."""
        for tier in self.tiers:
            tier.idle_prefetch = on

    # ---- requests of routers

    def request_early(self, layer: int, experts: Collection[int]) -> list[int]:
        """Requests what some of the step's tokens are routed to before the others reach the layer.

        The experts are requested at once, in the order in which they are routed (Klotski, section
        5). Returns those that were not requested before.
        """
        if not self._early_preemption:
            return []
        if layer not in self._early:
            self._pin_predicted(layer)
        early = self._early.setdefault(layer, {})
        new = [e for e in self._own(layer, experts) if e not in early]
        for e in new:
            early[e] = self._count_request(layer, e, self._predicted.get(layer, {}))
            if layer not in self._displaced:
                self.top.request((layer, e))
        return new

    def _pin_predicted(self, layer: int) -> None:
        """Pins resident predicted experts until the whole layer is routed.

        Tokens that have yet to reach the layer may need them, and other requests would evict them.
        """
        pinned = [e for e in self._predicted.get(layer, {}) if (layer, e) in self.top.cache.entries]
        for e in pinned:
            self.top.pin((layer, e))
        self._pinned_early[layer] = pinned

    def displace_early(self, layer: int) -> bool:
        """Ends the early requests of other layers if they leave this layer no slot.

        The layer's tokens are computed first. What later tokens route to the other layers is
        counted as before, but not requested until their routers have run for all tokens. Returns
        whether requests were ended.
        """
        if not self._early:
            return False
        others = [other for other in self._early if other != layer and other not in self._displaced]
        if not others or not all(entry.pins for entry in self.top.cache.entries.values()):
            return False
        for one in others:
            self._release_early(one)
            self._displaced.add(one)
        return True

    def _cancel_early(self) -> None:
        for layer in self._early.keys() - self._displaced:
            self._release_early(layer)
        self._early.clear()
        self._displaced.clear()

    def _release_early(self, layer: int) -> None:
        self.cancel(layer, list(self._early[layer]))
        self.cancel(layer, self._pinned_early.pop(layer, ()))

    def missed_in_host_memory(self, layer: int, experts: Collection[int]) -> list[int]:
        """Returns the experts of which nothing is here or requested and all is in host memory."""
        top = self.top
        return [
            e
            for e in experts
            if (layer, e) not in top.cache.entries
            and not top.is_requested((layer, e))
            and (top.below is None or top.below.is_ready((layer, e)))
        ]

    def request_routed(
        self,
        layer: int,
        tokens_per_expert: Mapping[int, int],
        computed_below: Collection[int] = (),
    ) -> list[int]:
        """Requests what the router has chosen (PushPreciseExperts); returns the computing order.

        Experts that have a slot are pinned until `release`; others are pinned when they get one.
        Experts that are `computed_below`, in host memory, are counted and not requested; each is
        pinned there until `release_below`.
        """
        own = tokens_per_expert
        if self._placement is not None:
            own = {e: tokens_per_expert[e] for e in self._own(layer, tokens_per_expert)}
        early = self._early.pop(layer, NOTHING_EARLY)
        num_missing = self.count_routed(layer, own, early)
        if computed_below:
            self.top.counters[layer].computed_below += len(computed_below)
            for e in computed_below:
                self.top.late.discard((layer, e))
                if self.top.below is not None:
                    self.top.below.pin((layer, e))
        held = NOTHING_EARLY if layer in self._displaced else early
        self._displaced.discard(layer)
        if held:
            self.cancel(layer, [e for e in held if e not in own])
        pinned = self._pinned_early.pop(layer, ())
        for tier in self._changing_tiers():
            tier.cache.on_routed(layer, own)
        if computed_below:
            own = {e: n for e, n in own.items() if e not in computed_below}
        self._advance(layer)
        if self._early_preemption or self._cancel_outdated:
            # ProMoE, algorithm 2, line 12; prefetches of experts that are needed go on.
            self.top.cancel_prefetches(layer, keep=own)
        if self._drop_used:
            self._evict_unused(
                layer, [e for owner, e in self.top.cache.entries if owner == layer], own
            )
        all_ready = num_missing == 0 and not early
        order = self._order_computation(layer, own, all_ready)
        if self._early_preemption:
            for e in order:
                if e not in held:
                    self.top.request((layer, e))
        if pinned:
            self.cancel(layer, pinned)
        if self._drop_used:
            self._evict_unused(layer, pinned, own)
        return order

    def _order_computation(
        self, layer: int, tokens_per_expert: Mapping[int, int], all_ready: bool
    ) -> list[int]:
        return order_computation(
            self.system,
            tokens_per_expert,
            None if all_ready else lambda e: self.top.progress((layer, e)),
        )

    def release_below(self, layer: int, experts: Collection[int]) -> None:
        """Unpins experts that have been computed in host memory."""
        if self.top.below is not None:
            for e in experts:
                self.top.below.release((layer, e))

    def _evict_unused(self, layer: int, experts: Sequence[int], used: Collection[int]) -> None:
        for e in experts:
            if e not in used:
                self.top.evict((layer, e))

    def next_candidates(self, layer: int, pending: Sequence[int]) -> Sequence[int]:
        """Returns which of the pending experts may be computed next, whichever is ready first.

        A system that does not reorder computes them in the order of `pending`: room is made for the
        first.
        """
        if not self._early_preemption:
            self.request((layer, pending[0]))  # and no other has been
        elif self._reordered:
            return pending
        else:
            self.make_room(layer, pending[0], pending)
        return pending[:1]

    def request(self, expert: Expert) -> None:
        """Requests the expert that is computed next, unless that was done and has not ended.

        Its layer was not requested at once, or `make_room` cancelled it while it was in flight, and
        it has arrived all the same: without a pin it could be evicted while it is computed.
        """
        if not self.top.is_requested(expert):
            self.top.request(expert)

    def make_room(self, layer: int, expert: int, coming: Sequence[int]) -> None:
        """Makes the expert the next to be computed.

        Computing in order of readiness frees slots by itself. A loop in a fixed order must not wait
        for a slot that only experts hold, or are about to get, that it computes later: as many of
        `coming` as there are slots keep their requests, in the order in which they are computed.
        """
        others = [e for e in self._own(layer, coming) if e != expert]
        num_others = max(0, self.top.cache.share(layer) - 1)
        self.cancel(layer, others[num_others:])
        self.request((layer, expert))
        if self._early_preemption:
            for e in others[:num_others]:
                self.request((layer, e))

    def release(self, expert: Expert) -> None:
        """Ends the request of an expert that has been computed."""
        assert expert in self.top.cache.entries, expert
        self.top.release(expert)
        if self._drop_used:
            self.top.evict(expert)

    def cancel(self, layer: int, experts: Sequence[int]) -> None:
        """Ends the requests of experts that are not going to be computed."""
        for e in self._own(layer, experts):
            if self.top.is_requested((layer, e)):
                self.top.release((layer, e))

    # ---- counting

    def count_routed(
        self, layer: int, experts: Collection[int], early: Mapping[int, bool] = NOTHING_EARLY
    ) -> int:
        """Counts the requests of a layer and how many of its predictions were in time.

        Returns the number of requests that are no hits, without early ones.

        Args:
            layer: The experts' layer.
            experts: What the router has chosen.
            early: Experts that were requested and counted before, and whether they were ready then.
        """
        named, num_missing = self._predicted.pop(layer, NOTHING_EARLY), 0
        for e in self._own(layer, experts):
            if e not in early and not self._count_request(layer, e, named):
                num_missing += 1
        if named:
            top = self.top
            counters = top.counters[layer]
            counters.predicted += len(named)
            for e, was_resident in named.items():
                if early[e] if e in early else top.is_ready((layer, e)):
                    counters.predicted_in_time += 1
                    counters.predicted_resident += was_resident
        return num_missing

    def _count_request(self, layer: int, e: int, named: Container[int]) -> bool:
        """Counts the first request of an expert in a step; returns whether it is a hit.

        `named`: experts of the layer that forecasts have named.
        """
        top = self.top
        counters = top.counters[layer]
        expert = layer, e
        is_hit = top.count_request(expert)
        entry = top.cache.entries.get(expert)
        if entry is not None and entry.speculative_bytes:
            counters.bytes_used += entry.speculative_bytes
            entry.speculative_bytes = 0
        if e in named:
            counters.needed_predicted += 1
            if is_hit:
                counters.needed_predicted_in_time += 1
            else:
                top.late.add(expert)
        return is_hit

    # ---- the whole cache

    def first_experts(self) -> list[list[Expert]]:
        """Returns the experts of each tier when it begins full, in topological order.

        "The GPU cache is initialized with experts with topological order where experts are filled
        into GPU layer by layer, and similarly, the host memory cache is set up with the rest
        experts that cannot fit into GPU" (MoE-Infinity, sequence level, section 6.1). Without
        `fill_first_layers` the computing tier begins empty.
        """
        rest = self._list_owned()
        tiers: list[list[Expert]] = []
        for tier in self.tiers:
            own: list[Expert] = []
            if tier is not self.top or self.system.fill_first_layers:
                own = tier.fitting(rest)
                filled = set(own)
                rest = [expert for expert in rest if expert not in filled]
            tiers.append(own)
        return tiers

    def fill_when_idle(self) -> None:
        """Lets idle links fetch all experts, in topological order, if no tier has to evict any."""
        if min(tier.cache.num_slots for tier in self.tiers) >= self._num_owned:
            self.top.fill_when_idle(self._list_owned())

    def _list_owned(self) -> list[Expert]:
        """Return the device's experts, in topological order."""
        experts = np.ndindex(len(self.top.counters), self._num_experts)
        return [(layer, e) for layer, e in experts if self.owns((layer, e))]

    def fill(self) -> None:
        """Fills the tiers at once, where no bytes are moved."""
        for tier, experts in zip(self.tiers, self.first_experts(), strict=True):
            tier.fill(experts)

    def reset(self, lost_slots: Sequence[Collection[int]]) -> None:
        """Keeps what has fully arrived and forgets everything else (`CacheTier.reset`).

        Args:
            lost_slots: Of each of `tiers`, slots that hanging transfers may still write to.
        """
        for tier, slots in zip(self.tiers, lost_slots, strict=True):
            tier.reset(slots)
        self._predicted.clear()
        self._early.clear()
        self._pinned_early.clear()
        self._displaced.clear()
