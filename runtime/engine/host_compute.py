"""Computes some missed experts where they lie, in host memory, in place of copying them.

`system.hybrid=true`: for each layer the split of the missed experts is taken for which the longer
of the two sides, copies or computation on the processor, is shortest
(`runtime.policy.placement`). The times of both sides are those of the steps themselves, so that
they contain what the sides take from each other. Where copies are faster nothing is computed there.
"""

from collections.abc import Mapping

from runtime.policy.device_cache import DeviceCache
from runtime.policy.placement import SplitCosts, choose_host_experts
from runtime.store.ggml.matrix import ExpertWeights
from runtime.transfer.arena import Arena
from runtime.transfer.loop import TierLink

MEMORY = 0.95
"""Weight of the past in the means of measured times."""


class HostCompute:
    """Chooses the missed experts to compute in host memory, from what that and copies have taken.

    Args:
        cache: of one device, with a tier in host memory.
        arena: the host memory's.
        copies: copies experts from there to the computing tier.
    """

    def __init__(self, cache: DeviceCache, arena: Arena, copies: TierLink):
        self._cache = cache
        self._arena = arena
        self._copies = copies
        self._waiting: dict[int, dict[int, int]] = {}
        """Chosen experts by layer that have not been computed yet, with their number of tokens."""
        self._copied_before = (0, 0.0)
        self._copied_bytes = self._copying_seconds = 0.0
        """Decaying sums; their ratio is the bandwidth of copies."""
        self._first_seconds: float | None = None
        """Time of an expert with one token."""
        self._further_seconds = 0.0
        """Time of each further token."""

    # ---- experts of a step

    def request_routed(self, layer: int, tokens_per_expert: dict[int, int]) -> list[int]:
        """Choose, and request the others of a router's choice; returns their computing order."""
        missed = self._cache.missed_in_host_memory(layer, tokens_per_expert)
        chosen = self._choose(layer, {e: tokens_per_expert[e] for e in missed})
        if chosen:
            self._waiting[layer] = {e: tokens_per_expert[e] for e in sorted(chosen)}
        return self._cache.request_routed(layer, tokens_per_expert, computed_below=chosen)

    def waiting(self, layer: int) -> list[int]:
        """Return the layer's chosen experts that have not been computed yet."""
        return list(self._waiting.get(layer, ()))

    def weights(self, layer: int, expert: int) -> ExpertWeights:
        """Return a chosen expert's parameters, in host memory; valid until `computed`."""
        entry = self._cache.tiers[1].cache.entries[layer, expert]
        return self._arena.weights(layer, entry.slot)

    def computed(self, layer: int, expert: int, seconds: float) -> None:
        """Release an expert and record what it took."""
        num_tokens = self._waiting[layer].pop(expert)
        self._cache.release_below(layer, [expert])
        self._record(num_tokens, seconds)

    def cancel(self) -> None:
        """Release the chosen experts that were never computed."""
        for layer, experts in self._waiting.items():
            self._cache.release_below(layer, experts)
        self._waiting.clear()

    def forget(self) -> None:
        """Forget the chosen experts, whose pins were dropped with all others."""
        self._waiting.clear()

    # ---- the choice

    def _choose(self, layer: int, tokens_per_expert: Mapping[int, int]) -> frozenset[int]:
        """Return the experts to compute in host memory, of the missed ones that are there."""
        self._measure_copies()
        if not (tokens_per_expert and self._copied_bytes):
            return frozenset()
        if self._first_seconds is None:
            # One expert, to know what it takes.
            fewest = min(tokens_per_expert, key=lambda e: (tokens_per_expert[e], e))
            return frozenset([fewest])
        first, further = self._first_seconds, self._further_seconds
        parts = [part for chunk in self._arena.chunk_ranges(layer) for part in chunk]
        expert_bytes = sum(end - start for start, end in parts)
        copy_seconds = expert_bytes * self._copying_seconds / self._copied_bytes
        costs = SplitCosts(
            copy_seconds=copy_seconds,
            host_seconds=lambda num_tokens: first + (num_tokens - 1) * further,
        )
        return choose_host_experts(tokens_per_expert, costs)[0]

    def _record(self, num_tokens: int, seconds: float) -> None:
        if self._first_seconds is None:
            self._first_seconds = self._further_seconds = seconds / num_tokens
        elif num_tokens == 1:
            self._first_seconds = _mix(self._first_seconds, seconds)
        else:
            further = max(0.0, seconds - self._first_seconds) / (num_tokens - 1)
            self._further_seconds = _mix(self._further_seconds, further)

    def _measure_copies(self) -> None:
        copied = self._copies.moved_bytes, self._copies.busy_seconds
        new_bytes = copied[0] - self._copied_before[0]
        if not new_bytes:
            return
        new_seconds = copied[1] - self._copied_before[1]
        self._copied_before = copied
        self._copied_bytes = MEMORY * self._copied_bytes + new_bytes
        self._copying_seconds = MEMORY * self._copying_seconds + new_seconds


def _mix(mean: float, value: float) -> float:
    return MEMORY * mean + (1 - MEMORY) * value
