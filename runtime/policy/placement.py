"""The assignment of experts to devices, where a model's experts are spread over several.

Shape suffixes: E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.policy.eviction.protocol import Expert

NO_DEVICE = -1


@dataclass(frozen=True)
class ExpertPlacement:
    """A hash of layer and expert.

    MoE-Infinity (request level), section 5.3: "a hashing function to assign the experts to
    different GPUs based on their IDs". The hash is the remainder of their sum: every device has the
    same number of each layer's experts, give or take one, and an id that is popular on all layers
    is on every device in turn.
    """

    num_devices: int = 1
    experts_per_layer: tuple[int, ...] = ()
    """Experts of each layer, where a few layers have less than the others; empty: all have as many.
    Ids at or above a layer's own are on no device."""

    def __post_init__(self) -> None:
        assert self.num_devices >= 1, self.num_devices

    def device(self, expert: Expert) -> int:
        """Return the expert's device, NO_DEVICE if there is no such expert."""
        layer, e = expert
        if self.experts_per_layer and e >= self.experts_per_layer[layer]:
            return NO_DEVICE
        return (layer + e) % self.num_devices

    def mask(self, layer: int, device: int, num_experts: int) -> NDArray[np.bool_]:
        """Returns `[E]`: whether each of the layer's experts is the device's."""
        own_E: NDArray[np.bool_] = (np.arange(num_experts) + layer) % self.num_devices == device
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
class BlockPlacement(ExpertPlacement):
    """Contiguous experts together, as Transformers' expert parallelism divides them over ranks."""

    num_experts: int = 1
    """Experts of each layer; a multiple of the number of ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.num_experts % self.num_devices == 0, (self.num_experts, self.num_devices)

    @property
    def num_local(self) -> int:
        """Experts of a layer on each rank."""
        return self.num_experts // self.num_devices

    def device(self, expert: Expert) -> int:
        return expert[1] // self.num_local

    def mask(self, layer: int, device: int, num_experts: int) -> NDArray[np.bool_]:  # noqa: ARG002
        return np.arange(num_experts) // self.num_local == device


@dataclass(frozen=True)
class RankPart:
    """The experts of one process of an expert-parallel model."""

    blocks: BlockPlacement
    rank: int
