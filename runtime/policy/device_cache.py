"""The cache of one device, or of several: ProMoE, algorithm 2, and the order of computation.

Every expert belongs to one device, which has separate tiers, queues and counters (MoE-Infinity,
request level, section 5.3: "for each GPU, we create an independent I/O thread").
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from predictors.base import Ints
from runtime.config import SystemConfig
from runtime.policy.cache import CacheEntry
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.policy.eviction.base import Expert, Probabilities
from runtime.policy.placement import ExpertPlacement
from runtime.policy.tier import CacheTier

NOTHING_EARLY: Mapping[int, bool] = MappingProxyType({})


class DeviceCache:
    """Decides in which order a layer's experts are requested and computed.

    Every method is given all experts of a layer; those of devices without a tier here are ignored.
    One thread calls it.

    Args:
        tiers: Of one device after another: the computing tier, the one below it, and so on.
        num_experts: Most experts of a layer, those of other devices included.
        system: What to request and in which order (ProMoE, figure 12; MoE-Infinity; Klotski).
        placement: Experts of each device, by `CacheTier.device`; None: all are on the only one.
    """

    def __init__(
        self,
        tiers: Sequence[CacheTier],
        *,
        num_experts: int,
        system: SystemConfig,
        placement: ExpertPlacement | None = None,
    ):
        self.tiers = tuple(tiers)
        self._tops = tuple(tier for tier in tiers if tier.is_top)
        self._lower = tuple(tier for tier in tiers if not tier.is_top)
        self.top = self._tops[0]
        self.system = system
        self._early_preemption = system.early_preemption
        self._reordered = system.reordered
        self._cancel_outdated = system.cancel
        self._drop_used = system.drop_used
        self._placement = placement or ExpertPlacement()
        self._only = self.top if placement is None else None
        """The computing tier of all experts; None: `computing_tier` says which is an expert's."""
        self._top_of_device = {top.device: top for top in self._tops}
        self._num_experts = num_experts
        self._num_owned = sum(len(self._list_owned(top)) for top in self._tops)
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
        """Returns whether the expert is on a device that has tiers here."""
        return self._only is not None or self._placement.device(expert) in self._top_of_device

    def _own(self, layer: int, experts: Collection[int]) -> Collection[int]:
        if self._only is not None:
            return experts
        return [e for e in experts if self.owns((layer, e))]

    def computing_tier(self, expert: Expert) -> CacheTier:
        """Returns the computing tier of one of the experts that are here."""
        return self._only or self._top_of_device[self._placement.device(expert)]

    def _on_device(self, tier: CacheTier, layer: int, experts: Sequence[int]) -> Sequence[int]:
        if self._only is not None:
            return experts
        return [e for e in experts if self._placement.device((layer, e)) == tier.device]

    def _mask(self, tier: CacheTier, layer: int, value_E: Probabilities) -> Probabilities:
        """Returns 0 for other devices' experts: the eviction policy must not fetch them."""
        if self._only is not None:
            return value_E
        mask_E = self._placement.mask(layer, tier.device, np.shape(value_E)[-1])
        return np.where(mask_E, value_E, 0.0)

    # ---- counters and sizes

    @property
    def counters(self) -> list[CacheCounters]:
        """Counters of each layer in the computing tiers, of several devices added up."""
        if len(self._tops) == 1:
            return self.top.counters
        return list(map(sum_counters, zip(*[top.counters for top in self._tops], strict=True)))

    @property
    def num_slots(self) -> int:
        return sum([top.cache.num_slots for top in self._tops])

    @property
    def pending_bytes(self) -> int:
        """Bytes fetched on predictions whose expert has not been requested yet."""
        # Any thread may ask.
        entries = [entry for top in self._tops for entry in list(top.cache.entries.values())]
        return sum([entry.speculative_bytes for entry in entries])

    # ---- lookups

    @property
    def is_complete(self) -> bool:
        """Whether all experts of the devices are in the computing tiers to stay.

        From then on every request is a hit and nothing is fetched or evicted, so that forecasts,
        reuse scores and routing make no difference: `count_routed` is all that a layer needs.
        """
        return self._changing_tiers() is self._lower

    def is_ready(self, expert: Expert) -> bool:
        top = self._only or self.computing_tier(expert)
        return top.is_ready(expert)

    def first_ready(self, layer: int, experts: Sequence[int]) -> int | None:
        """Returns the first of a layer's experts that is ready; None: none is."""
        for e in experts:
            expert = layer, e
            top = self._only or self.computing_tier(expert)
            if top.is_ready(expert):
                return e
        return None

    def lacks(self, layer: int, experts: Collection[int]) -> bool:
        """Returns whether room must be made for one of a layer's experts."""
        return not all([self.entry((layer, e)) for e in self._own(layer, experts)])

    def entry(self, expert: Expert) -> CacheEntry | None:
        top = self._only or self.computing_tier(expert)
        return top.cache.entries.get(expert)

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
        num_ready = 0
        for top in self._tops:
            num_ready += top.num_ready
        is_complete = num_ready == self._num_owned and not self._drop_used
        return self._lower if is_complete else self.tiers

    def begin_step(self, requests_T: Ints) -> None:
        self._cancel_early()
        self._advance(-1)
        for tier in self._changing_tiers():
            tier.cache.expect_changes().begin_step(requests_T)

    def end_step(self) -> None:
        self._cancel_early()
        for tier in self._changing_tiers():
            tier.cache.expect_changes().end_step()

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        for tier in self._changing_tiers():
            tier.cache.expect_changes().on_tokens_routed(layer, experts_TK)

    def on_forecast(self, layer: int, probability_E: Probabilities, order_E: Probabilities) -> None:
        for tier in self._changing_tiers():
            probability_own_E = self._mask(tier, layer, probability_E)
            order_own_E = self._mask(tier, layer, order_E)
            tier.cache.expect_changes().on_forecast(layer, probability_own_E, order_own_E)

    def on_reuse_scores(self, layer: int, score_1E: Probabilities) -> None:
        for tier in self._changing_tiers():
            tier.cache.expect_changes().on_reuse_scores(layer, self._mask(tier, layer, score_1E))

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
        predicted = self._predicted.get(layer)
        if predicted is None:
            predicted = self._predicted[layer] = {}
        if self._cancel_outdated:
            kept = set(experts)
            for top in self._tops:
                top.cancel_prefetches(layer, kept)
            predicted.clear()
        for e in self._own(layer, experts if named is None else named):
            if e not in predicted:
                expert = layer, e
                top = self._only or self.computing_tier(expert)
                entry = top.cache.entries.get(expert)
                is_known = entry is not None and not entry.speculative_bytes
                predicted[e] = is_known and top.is_ready(expert)
        importance = probabilities
        for top in self._tops:
            own, share = self._on_device(top, layer, experts), top.cache.share(layer)
            if self._only is None:
                given = dict(zip(experts, probabilities, strict=True))
                importance = [given[e] for e in own]
            if len(own) > share:
                own = own[:share]
            top.prefetch_all(layer, own, importance)

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
                self.computing_tier((layer, e)).request((layer, e))
        return new

    def _pin_predicted(self, layer: int) -> None:
        """Pins resident predicted experts until the whole layer is routed.

        Tokens that have yet to reach the layer may need them, and other requests would evict them.
        """
        pinned = [e for e in self._predicted.get(layer, {}) if self.entry((layer, e)) is not None]
        for e in pinned:
            self.computing_tier((layer, e)).pin((layer, e))
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
        if not others or not any(self._is_pinned(top, layer) for top in self._tops):
            return False
        for one in others:
            self._release_early(one)
            self._displaced.add(one)
        return True

    @staticmethod
    def _is_pinned(top: CacheTier, layer: int) -> bool:
        """Returns whether all experts in slots that are large enough for the layer's are pinned."""
        first, entries = top.cache.first_slots[layer], top.cache.entries.values()
        return all(entry.pins for entry in entries if entry.slot >= first)

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
        if self._only is None:
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
            here = own
            if self._only is None:
                here = {e: own[e] for e in self._on_device(tier, layer, list(own))}
            tier.cache.expect_changes().on_routed(layer, here)
        if computed_below:
            own = {e: n for e, n in own.items() if e not in computed_below}
        self._advance(layer)
        if self._early_preemption or self._cancel_outdated:
            # ProMoE, algorithm 2, line 12; prefetches of experts that are needed go on.
            for top in self._tops:
                top.cancel_prefetches(layer, keep=own)
        if self._drop_used:
            for top in self._tops:
                resident = [e for owner, e in top.cache.entries if owner == layer]
                self._evict_unused(layer, resident, own)
        all_ready = num_missing == 0 and not early
        order = self._order_computation(layer, own, all_ready)
        if self._early_preemption:
            for e in order:
                if e not in held:
                    expert = layer, e
                    top = self._only or self.computing_tier(expert)
                    top.request(expert)
        if pinned:
            self.cancel(layer, pinned)
        if self._drop_used:
            self._evict_unused(layer, pinned, own)
        return order

    def _order_computation(
        self, layer: int, tokens_per_expert: Mapping[int, int], all_ready: bool
    ) -> list[int]:
        """Returns a layer's experts in the order in which to compute them.

        Resident experts come first, then those in flight by the chunks that have arrived, then
        missing ones (ProMoE, section 5.3); without reordering by id, or by the number of their
        tokens.
        """
        order = sorted(tokens_per_expert)
        if self.system.hot_first:
            order.sort(key=tokens_per_expert.__getitem__, reverse=True)
        if self._reordered and not all_ready:
            tops = {e: self._only or self.computing_tier((layer, e)) for e in order}
            order.sort(key=lambda e: tops[e].progress((layer, e)), reverse=True)
        return order

    def release_below(self, layer: int, experts: Collection[int]) -> None:
        """Unpins experts that have been computed in host memory."""
        if self.top.below is not None:
            for e in experts:
                self.top.below.release((layer, e))

    def _evict_unused(self, layer: int, experts: Sequence[int], used: Collection[int]) -> None:
        for e in experts:
            if e not in used:
                self.computing_tier((layer, e)).evict((layer, e))

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
        top = self._only or self.computing_tier(expert)
        if not top.is_requested(expert):
            top.request(expert)

    def make_room(self, layer: int, expert: int, coming: Sequence[int]) -> None:
        """Makes the expert the next to be computed.

        Computing in order of readiness frees slots by itself. A loop in a fixed order must not wait
        for a slot that only experts hold, or are about to get, that it computes later: as many of
        `coming` as there are slots keep their requests, in the order in which they are computed.
        """
        top = self.computing_tier((layer, expert))
        others = [e for e in self._on_device(top, layer, coming) if e != expert]
        num_others = max(0, top.cache.share(layer) - 1)
        self.cancel(layer, others[num_others:])
        self.request((layer, expert))
        if self._early_preemption:
            for e in others[:num_others]:
                self.request((layer, e))

    def release(self, expert: Expert) -> None:
        """Ends the request of an expert that has been computed."""
        top = self._only or self.computing_tier(expert)
        assert expert in top.cache.entries, expert
        top.release(expert)
        if self._drop_used:
            top.evict(expert)

    def cancel(self, layer: int, experts: Sequence[int]) -> None:
        """Ends the requests of experts that are not going to be computed."""
        for e in self._own(layer, experts):
            top = self.computing_tier((layer, e))
            if top.is_requested((layer, e)):
                top.release((layer, e))

    # ---- counting

    def count_routed(
        self, layer: int, experts: Collection[int], early: Mapping[int, bool] = NOTHING_EARLY
    ) -> int:
        """Counts the requests of a layer and its predictions.

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
        for e in named:
            top = self._only or self.computing_tier((layer, e))
            counters = top.counters[layer]
            counters.predicted += 1
        return num_missing

    def _count_request(self, layer: int, e: int, named: Mapping[int, bool]) -> bool:
        """Counts the first request of an expert in a step; returns whether it is a hit.

        `named`: experts of the layer that forecasts have named, and whether each was resident then.
        """
        expert = layer, e
        top = self._only or self.computing_tier(expert)
        counters = top.counters[layer]
        is_hit = top.count_request(expert)
        entry = top.cache.entries.get(expert)
        if entry is not None and entry.speculative_bytes:
            counters.bytes_used += entry.speculative_bytes
            entry.speculative_bytes = 0
        if e in named:
            counters.needed_predicted += 1
            if is_hit:
                counters.needed_predicted_in_time += 1
                counters.needed_predicted_resident += named[e]
            else:
                top.late.add(expert)
        return is_hit

    # ---- the whole cache

    @property
    def begins_full(self) -> bool:
        """Whether the computing tiers hold experts before the first step.

        Systems that prefetch read everything at once where there is room for it.
        """
        return self.system.fill_first_layers or (
            self.system.prefetch and self.num_slots >= self._num_owned
        )

    def first_experts(self, *, fills_top: bool) -> list[list[Expert]]:
        """Returns the experts of each tier when it begins full, in topological order.

        "The GPU cache is initialized with experts with topological order where experts are filled
        into GPU layer by layer, and similarly, the host memory cache is set up with the rest
        experts that cannot fit into GPU" (MoE-Infinity, sequence level, section 6.1).

        Args:
            fills_top: Off: the computing tiers begin empty.
        """
        tiers: list[list[Expert]] = []
        for tier in self.tiers:
            if tier.is_top:
                rest = self._list_owned(tier)
            own: list[Expert] = []
            if not tier.is_top or fills_top:
                own = tier.cache.fitting(rest)
                filled = set(own)
                rest = [expert for expert in rest if expert not in filled]
            tiers.append(own)
        return tiers

    def _list_owned(self, top: CacheTier) -> list[Expert]:
        """Return the experts of a tier's device, in topological order."""
        experts = np.ndindex(len(top.counters), self._num_experts)
        return [
            (layer, e) for layer, e in experts if self._placement.device((layer, e)) == top.device
        ]

    def fill(self) -> None:
        """Fills the tiers at once, where no bytes are moved."""
        first = self.first_experts(fills_top=self.system.fill_first_layers)
        for tier, experts in zip(self.tiers, first, strict=True):
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


def count_tokens(experts_TK: Ints, num_experts: int) -> dict[int, int]:
    """Returns the number of tokens of each chosen expert, ascending.

    Ids that are none, such as `num_experts`, stand for a choice of none and are left out.
    """
    if len(experts_TK) > 1:
        experts, counts = np.unique(experts_TK, return_counts=True)
        pairs = zip(experts.tolist(), counts.tolist(), strict=True)
        return {e: n for e, n in pairs if 0 <= e < num_experts}
    chosen = experts_TK.ravel().tolist()
    return {e: chosen.count(e) for e in sorted(chosen) if 0 <= e < num_experts}
