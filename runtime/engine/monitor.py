"""Observes a running engine: counters, tiers, and where experts are.

Any thread may look while the model's thread goes on: numbers may be of a moment ago.
"""

from collections.abc import Sequence
from copy import copy

from runtime.engine.engine import Engine
from runtime.errors import Fault
from runtime.policy.cache import CacheEntry
from runtime.policy.counters import CacheCounters, sum_counters
from runtime.policy.eviction.base import Expert
from runtime.policy.tier import CacheTier
from runtime.transfer.arena import Arena

ABSENT, BELOW, COMING, CACHED, PINNED = ".", "h", "f", "c", "p"
"""States of an expert: on disk only; in host memory below the device; in part, or in flight;
cached; pinned."""


class TierState:
    """The state of one tier.

    Args:
        name: `host`, or `device`, with its number where there are several.
    """

    def __init__(self, tier: CacheTier, name: str, arena: Arena):
        entries = list(tier.cache.entries.values())
        self.name = name
        self.computes = tier.is_top
        """Experts are computed from it; else it feeds the tier above."""
        self.num_slots = tier.cache.num_slots
        self.used_bytes = sum(arena.slot_bytes(entry.slot) for entry in entries)
        """Size of the slots that belong to an expert."""
        self.budget_bytes = arena.num_bytes
        """Size of its arena, which is allocated once."""
        self.num_used = len(entries)
        """Slots that belong to an expert, fully arrived or not."""
        self.num_pinned = sum(entry.pins > 0 for entry in entries)
        """Pinned slots: an expert is computed or copied, or is about to be."""
        self.num_in_flight = sum(entry.in_flight for entry in entries)
        """Slots that bytes are being written to."""
        self.num_quarantined = tier.cache.num_quarantined
        """Slots that hung reads may still write into."""
        self.layers = tuple(map(copy, tier.counters))
        """Since the model was loaded, of each layer with routed experts."""

    @property
    def total(self) -> CacheCounters:
        return sum_counters(self.layers)


class EngineSnapshot:
    """An engine at one moment."""

    def __init__(self, engine: Engine):
        tiers, loop, driver = engine.cache.tiers, engine.loop, engine.driver
        self.tiers = tuple(map(TierState, tiers, name_tiers(tiers), engine.arenas))
        self.faults = {str(fault): count for fault, count in loop.faults.copy().items()}
        """Transfers that went wrong, by kind (`runtime.errors.Fault`) that there was."""
        self.num_lost_threads = loop.num_hanging
        """Threads that hang in a transfer now."""
        self.stall_seconds = loop.stall_seconds
        """Time in which the computation waited for bytes."""
        self.predictor_seconds = driver.seconds
        self.predictor_failures = driver.failures
        """Reasons why predictors were turned off, by `predictor` and `reuse_predictor`."""
        self.predictor_drift = driver.drift_report
        """The predictor's accuracy and that of its card; None: it has no card."""
        self.link_seconds: dict[str, float] = {}
        """Time that each link's transfers took, added up, by the link's name."""
        for link in loop.links:
            before = self.link_seconds.get(link.name, 0.0)
            self.link_seconds[link.name] = before + link.busy_seconds
        self.prefetching = None if engine.payoff is None else engine.payoff.is_on
        """Whether an adaptive system prefetches now; None: not adaptive."""

    @property
    def fault_counts(self) -> dict[str, int]:
        """Faults of all kinds, those that there was none of too."""
        return {kind: self.faults.get(kind, 0) for kind in Fault}

    @property
    def num_failed_predictors(self) -> int:
        return len(self.predictor_failures)

    @property
    def computing(self) -> CacheCounters:
        """Counters of the tiers that compute, all layers added up."""
        return sum_counters(tier.total for tier in self.tiers if tier.computes)

    @property
    def computing_layers(self) -> list[CacheCounters]:
        tiers = [tier.layers for tier in self.tiers if tier.computes]
        return [sum_counters(layers) for layers in zip(*tiers, strict=True)]


class EngineMonitor:
    """Looks at one engine; any thread may ask."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(self.engine)

    def cells(self) -> list[str]:
        """Return where each expert is: a string for each layer, a letter for each expert."""
        tiers = self.engine.cache.tiers
        held = [(tier, dict(tier.cache.entries)) for tier in tiers]
        rows = [[ABSENT] * count for count in self.engine.store.experts_per_layer]
        # The computing tiers last: their states take precedence.
        for tier, entries in sorted(held, key=lambda pair: pair[0].is_top):
            for expert, entry in entries.items():
                state = _where(tier, expert, entry)
                if state != ABSENT:
                    rows[expert[0]][expert[1]] = state
        return ["".join(row) for row in rows]


def _where(tier: CacheTier, expert: Expert, entry: CacheEntry) -> str:
    is_ready = entry.ready_chunks == tier.num_chunks(expert)
    if not tier.is_top:
        return BELOW if is_ready else ABSENT
    if not is_ready:
        return COMING
    return PINNED if entry.pins else CACHED


def name_tiers(tiers: Sequence[CacheTier]) -> list[str]:
    """A name for each: memory that feeds a tier above is `host`, and so is the only one."""
    num_devices = sum(tier.is_top for tier in tiers)
    names, number = [], -1
    for tier in tiers:
        number += tier.is_top  # each device's tiers begin with the one that computes
        kind = "device" if tier.is_top and tier.below is not None else "host"
        names.append(f"{kind}{number}" if num_devices > 1 else kind)
    return names
