"""Splits a layer's missed experts between the accelerator and the processor of host memory.

An expert that lies in host memory can be copied to the accelerator and computed there, or computed
where it lies. Both go on at once, so the layer waits for the longer of the two.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """Seconds of both sides, measured while the other side is busy: they share host memory."""

    copy_seconds: float
    """Time per expert on the accelerator's side: its copy, or its computation where that is
    longer, since the two overlap. The experts of a layer have the same size."""
    host_seconds: Callable[[int], float]
    """Time of one expert on the processor, by the number of its tokens."""
    copy_fixed: float = 0.0
    """Time of the accelerator's side once per layer, if it has any expert: the launch."""
    host_fixed: float = 0.0
    """Time of the processor's side once per layer, if it has any expert: the hand-over, the copy of
    the activations down and of the results up."""

    def copy_side(self, num_experts: int) -> float:
        return self.copy_fixed + self.copy_seconds * num_experts if num_experts else 0.0

    def host_side(self, num_tokens: Collection[int]) -> float:
        """Returns the time of experts with these numbers of tokens."""
        return self.host_fixed + sum(map(self.host_seconds, num_tokens)) if num_tokens else 0.0


def choose_host_experts(
    tokens_per_expert: Mapping[int, int], costs: SplitCosts
) -> tuple[frozenset[int], float]:
    """Returns the missed experts to compute on the processor, and the time of the longer side.

    No other split has a shorter time: copies all take as long as each other, so that for each
    number of experts on the processor the cheapest ones there are best. Among equal splits that
    with the most copies is taken, since a copied expert is in the cache afterwards.
    """
    host_seconds = {
        expert: costs.host_seconds(num_tokens) for expert, num_tokens in tokens_per_expert.items()
    }
    order = sorted(host_seconds, key=lambda expert: (host_seconds[expert], expert))
    num_on_host, best_seconds = 0, costs.copy_side(len(order))
    host_side = costs.host_fixed
    for count, expert in enumerate(order, start=1):
        host_side += host_seconds[expert]
        seconds = max(costs.copy_side(len(order) - count), host_side)
        if seconds < best_seconds:
            num_on_host, best_seconds = count, seconds
    return frozenset(order[:num_on_host]), best_seconds
