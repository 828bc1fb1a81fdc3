"""Places for experts to be computed: one of several devices, or the processor of host memory.

A model's experts may be spread over several devices. An expert that is missed and lies in host
memory can be copied to the accelerator and computed there, or computed where it lies. Both go on at
once, so the layer waits for the longer of the two.

Shape suffixes: E experts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.policy.eviction.base import Expert

NO_DEVICE = -1


@dataclass(frozen=True)
class ExpertPlacement:
    """A hash of layer and expert, or blocks of experts.

    MoE-Infinity (request level), section 5.3: "a hashing function to assign the experts to
    different GPUs based on their IDs". The hash is the remainder of their sum: every device has the
    same number of each layer's experts, give or take one, and an id that is popular on all layers
    is on every device in turn.
    """

    num_devices: int = 1
    experts_per_layer: tuple[int, ...] = ()
    """Experts of each layer, where a few layers have less than the others; empty: all have as many.
    Ids at or above a layer's own are on no device."""
    block_size: int = 0
    """Consecutive experts of a layer on each device, as in Transformers' expert parallelism; 0: the
    hash decides."""

    def __post_init__(self) -> None:
        assert self.num_devices >= 1, self.num_devices

    def device(self, expert: Expert) -> int:
        """Return the expert's device, NO_DEVICE if there is no such expert."""
        layer, e = expert
        if self.experts_per_layer and e >= self.experts_per_layer[layer]:
            return NO_DEVICE
        return e // self.block_size if self.block_size else (layer + e) % self.num_devices

    def mask(self, layer: int, device: int, num_experts: int) -> NDArray[np.bool_]:
        """Returns `[E]`: whether each of the layer's experts is the device's."""
        ids_E = np.arange(num_experts)
        block_size = self.block_size
        device_E = ids_E // block_size if block_size else (ids_E + layer) % self.num_devices
        own_E: NDArray[np.bool_] = device_E == device
        if self.experts_per_layer:
            own_E[self.experts_per_layer[layer] :] = False
        return own_E

    def num_owned(self, device: int, *, num_layers: int, num_experts: int) -> list[int]:
        """Returns how many of each layer's experts are the device's."""
        layers = range(num_layers)
        return [int(self.mask(layer, device, num_experts).sum()) for layer in layers]


def place_experts(experts_per_layer: Sequence[int], num_devices: int = 1) -> ExpertPlacement:
    """Return the placement of layers with these numbers of experts."""
    is_even = len(set(experts_per_layer)) == 1
    return ExpertPlacement(num_devices, () if is_even else tuple(experts_per_layer))


@dataclass(frozen=True)
class RankPart:
    """The experts of one process of an expert-parallel model."""

    blocks: ExpertPlacement
    rank: int


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
