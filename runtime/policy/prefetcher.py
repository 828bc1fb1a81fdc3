"""promoe algorithm 2 over the tiers, the order of computation, and what both are counted by."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from runtime.policy.cache import Entry
from runtime.policy.counters import Counters
from runtime.policy.eviction import Expert, Probabilities
from runtime.policy.tier import Task, Tier

__all__ = ["Prefetcher", "Task", "Techniques"]


@dataclass(frozen=True)
class Techniques:
    """Each of promoe's techniques has its own switch (figure 12's ablation)."""

    chunked: bool = True
    """5.1: an expert is fetched linear layer by linear layer; off: whole."""
    early_preemption: bool = True
    """5.2: all of a layer's experts are asked for when its router has spoken; off: one by one."""
    reordered: bool = True
    """5.3: compute in order of readiness; off: in order of expert id."""
    cancel: bool = False
    """A new forecast for a layer takes back what an earlier one asked for and it does not name
    (moe-infinity-request-level 5.1)."""
    hot_first: bool = False
    """Of experts that are equally ready, the one that most tokens wait for first (klotski 5)."""
    drop_used: bool = False
    """What has been used, or was forecast in vain, leaves at once (klotski 5)."""


def computing_order(
    techniques: Techniques, tokens_per_expert: Mapping[int, int], progress: Callable[[int], float]
) -> list[int]:
    """A layer's experts as they are to be computed: cached come first, then in flight by chunks
    arrived, then missing (5.3); without reordering by id, or by the number of their tokens.
    """
    order = sorted(tokens_per_expert)
    if techniques.hot_first:
        order.sort(key=lambda e: -tokens_per_expert[e])
    if techniques.reordered:
        order.sort(key=lambda e: -progress(e))
    return order


class Prefetcher:
    """Decides in which order a layer's experts are asked for and computed.

    Not thread-safe: the driver holds one lock around every call.

    Args:
        tiers: the one that computes first, then the one below it, and so on.
    """

    def __init__(self, tiers: Sequence[Tier], *, techniques: Techniques):
        self.tiers = tuple(tiers)
        self.top = self.tiers[0]
        self.techniques = techniques
        self._predicted: dict[int, dict[int, None]] = {}
        """What was predicted for each layer since it was last routed."""
        self._early: dict[int, dict[int, bool]] = {}
        """What a part of the step's tokens was routed to in each layer that the others have yet to
        reach, and whether it was ready then."""
        self._held: dict[int, list[int]] = {}
        """What keeps its slot in these layers though nobody has asked for it yet."""

    @property
    def counters(self) -> list[Counters]:
        """Of each layer, for the tier that computes."""
        return self.top.counters

    @counters.setter
    def counters(self, counters: list[Counters]) -> None:
        self.top.counters = counters

    def begin_step(self, *, new_request: bool) -> None:
        """A forward pass starts."""
        self._forget_early()
        for tier in self.tiers:
            tier.cache.begin_step(new_request=new_request)

    def end_step(self) -> None:
        """The forward pass is over."""
        self._forget_early()
        for tier in self.tiers:
            tier.cache.end_step()

    def idle_prefetch(self, on: bool) -> None:
        """Whether links that nobody has asked for anything bring what eviction policies want."""
        for tier in self.tiers:
            tier.fills_idle = on

    def repair(self, under_way: Sequence[Collection[Task]]) -> None:
        """Ctrl-C may have cut any of these calls short: nothing is believed but the transfers that
        are under way in each tier. What was claimed or predicted is forgotten.
        """
        copies: Collection[Task] = ()
        for tier, tasks in zip(self.tiers, under_way, strict=True):
            tier.repair(tasks, copies=copies)
            copies = tasks
        self._predicted.clear()
        self._early.clear()
        self._held.clear()

    def forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        """A predictor's scores of a layer, for policies that drop by them."""
        for tier in self.tiers:
            tier.cache.forecast(layer, probability_E)

    def valued(self, layer: int, value_E: Probabilities) -> None:
        """How much a layer's experts will be used after this step, for policies that keep by it."""
        for tier in self.tiers:
            tier.cache.valued(layer, value_E)

    def predicted(self, layer: int, experts: Sequence[int], priority: Sequence[float]) -> None:
        """Algorithm 2, PushPredictedExperts; the most wanted first.

        What a layer's share of the arena cannot hold at once is not queued: it would only push out
        what was predicted before it.
        """
        named = self._predicted.setdefault(layer, {})
        if self.techniques.cancel:
            self.top.drop_speculation(layer, keep=frozenset(experts))
            named.clear()
        for e in experts:
            named[e] = None
        room = self.top.cache.share(layer)
        for e, urgent in list(zip(experts, priority, strict=True))[:room]:
            self.top.speculate((layer, e), urgent)

    def cancel(self, layer: int) -> None:
        """Drops what was only predicted for a layer; its bytes that arrived stay."""
        self.top.drop_speculation(layer)
        self._predicted.pop(layer, None)

    def partly_routed(self, layer: int, experts: Collection[int]) -> list[int]:
        """A part of the step's tokens needs these, and the other tokens have yet to reach the
        layer: they are asked for at once, in the order in which they are routed (klotski 5).

        Returns those that are asked for now.
        """
        if not self.techniques.early_preemption:
            return []
        if layer not in self._early:
            self._hold_forecast(layer)
        early = self._early.setdefault(layer, {})
        new = [e for e in experts if e not in early]
        for e in new:
            early[e] = self.top.is_ready((layer, e))
            self._count_asked(layer, e)
            self.top.claim((layer, e))
        return new

    def _hold_forecast(self, layer: int) -> None:
        """What was forecast and is here stays until the whole layer is routed: tokens that have yet
        to reach it may need it, and what others ask for meanwhile would push it out.
        """
        held = [e for e in self._predicted.get(layer, {}) if self.top.cache.get((layer, e))]
        for e in held:
            self.top.hold((layer, e))
        self._held[layer] = held

    def early(self, layer: int) -> Collection[int]:
        """What `partly_routed` has asked for in a layer that is not routed yet."""
        return self._early.get(layer, ())

    def _forget_early(self) -> None:
        for layer, experts in self._early.items():
            self.abandon(layer, list(experts))
            self.abandon(layer, self._held.pop(layer, []))
        self._early.clear()

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> list[int]:
        """Algorithm 2, PushPreciseExperts: returns the order in which to compute.

        The experts that have a slot are pinned until `used`; the others are pinned when they get
        one.
        """
        early = self._early.pop(layer, {})
        self._count_routed(layer, tokens_per_expert, early)
        self.abandon(layer, [e for e in early if e not in tokens_per_expert])
        held = self._held.pop(layer, [])
        for tier in self.tiers:
            tier.cache.routed(layer, tokens_per_expert)
        # What is about to be claimed needs no dropping, unless experts wait for their turn.
        keep = tokens_per_expert if self.techniques.early_preemption else ()
        self.top.drop_speculation(layer, keep=frozenset(keep))
        if self.techniques.drop_used:
            for e in self._resident(layer):
                if e not in tokens_per_expert:
                    self.top.drop((layer, e))
        order = computing_order(
            self.techniques, tokens_per_expert, lambda e: self.progress((layer, e))
        )
        if self.techniques.early_preemption:
            for e in order:
                if e not in early:
                    self.top.claim((layer, e))
        self.abandon(layer, held)
        if self.techniques.drop_used:
            for e in held:
                if e not in tokens_per_expert:
                    self.top.drop((layer, e))
        return order

    def demand(self, expert: Expert) -> None:
        """Asks for one expert now: what happens without early preemption, when it is its turn."""
        if not self.techniques.early_preemption and not self.top.is_claimed(expert):
            self.top.claim(expert)

    def make_room(self, layer: int, expert: int, coming: Sequence[int]) -> bool:
        """The expert is computed next, whatever is ready; returns whether anything was asked anew.

        Computing in order of readiness frees slots by itself. A loop in an order of its own must
        not wait for a slot that only experts hold, or are about to get, to which it comes later:
        as many of `coming` as there are slots keep their claims, in the order in which they are
        computed.
        """
        top, num_others = self.top, max(0, self.top.cache.share(layer) - 1)
        others = [e for e in coming if e != expert]
        self.abandon(layer, others[num_others:])
        ahead = others[:num_others] if self.techniques.early_preemption else []
        anew = [e for e in (expert, *ahead) if not top.is_claimed((layer, e))]
        for e in anew:
            top.claim((layer, e))
        return bool(anew)

    def _count_routed(
        self, layer: int, experts: Mapping[int, int], early: Mapping[int, bool]
    ) -> None:
        top, counters = self.top, self.top.counters[layer]
        for e in experts:
            if e not in early:
                self._count_asked(layer, e)
        named = self._predicted.pop(layer, {})
        counters.predicted += len(named)
        counters.predicted_in_time += sum(
            early[e] if e in early else top.is_ready((layer, e)) for e in named
        )

    def _count_asked(self, layer: int, e: int) -> None:
        """A router asks for the expert; not the first one to do so, where it is asked for early."""
        top, counters, expert = self.top, self.top.counters[layer], (layer, e)
        entry = top.cache.get(expert)
        ready = top.is_ready(expert)
        is_named = e in self._predicted.get(layer, {})
        top.count_asked(expert)
        counters.needed_predicted += is_named
        counters.needed_predicted_in_time += ready and is_named
        if entry is not None:
            counters.bytes_used += entry.speculative_bytes
            entry.speculative_bytes = 0
        if is_named and not ready:
            top.late.add(expert)

    def _resident(self, layer: int) -> list[int]:
        return [e for one, e in self.top.cache if one == layer]

    def used(self, expert: Expert) -> None:
        """The expert's computation is over; it may be dropped when somebody needs the slot."""
        assert self.top.cache.get(expert) is not None, expert
        self.top.release(expert)
        if self.techniques.drop_used:
            self.top.drop(expert)

    def abandon(self, layer: int, experts: Sequence[int]) -> None:
        """A step ends without computing these: pins and requests are taken back."""
        for e in experts:
            if self.top.is_claimed((layer, e)):
                self.top.release((layer, e))

    def is_ready(self, expert: Expert) -> bool:
        """All chunks are where they can be computed with."""
        return self.top.is_ready(expert)

    def progress(self, expert: Expert) -> float:
        """Larger is sooner ready; -1 when the expert has no slot."""
        return self.top.progress(expert)

    def entry(self, expert: Expert) -> Entry | None:
        """The expert's slot where it is computed."""
        return self.top.cache.get(expert)

    def fill(self, num_experts: int) -> None:
        """As after loading: the tiers below the one that computes hold what fits of the model."""
        for tier in self.tiers[1:]:
            tier.fill(num_experts)

    @property
    def num_slots(self) -> int:
        """Experts that fit where they are computed."""
        return self.top.cache.num_slots

    @property
    def pending_bytes(self) -> int:
        """Fetched on predictions, and not asked for yet."""
        return sum(entry.speculative_bytes for entry in self.top.cache.entries.values())

    def total(self) -> Counters:
        """The layers' counters added up, for the tier that computes."""
        return self.top.total()
