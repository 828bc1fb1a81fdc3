"""Which device an expert belongs to, where a model's experts are spread over several.

Shape suffixes: E experts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.policy.eviction import Expert


@dataclass(frozen=True)
class Placement:
    """A hash of layer and expert (moe-infinity-request 5.3: "a hashing function to assign the
    experts to different GPUs based on their IDs").

    The remainder of their sum: every device has the same number of each layer's experts, give or
    take one, and an id that is popular on all layers is on every device in turn.
    """

    num_devices: int = 1

    def __post_init__(self) -> None:
        assert self.num_devices >= 1, self.num_devices

    def device(self, expert: Expert) -> int:
        """Number of the device that holds and computes the expert, nobody else does."""
        return (expert[0] + expert[1]) % self.num_devices

    def mask(self, layer: int, device: int, num_experts: int) -> NDArray[np.bool_]:
        """`[E]`: which of the layer's experts are the device's."""
        return (np.arange(num_experts) + layer) % self.num_devices == device

    def num_owned(self, device: int, *, num_layers: int, num_experts: int) -> int:
        """Experts of the whole model that are the device's."""
        layers = range(num_layers)
        return sum(int(self.mask(layer, device, num_experts).sum()) for layer in layers)


@dataclass(frozen=True)
class Blocks(Placement):
    """Neighbouring experts together: what Transformers' expert parallelism gives its ranks."""

    num_experts: int = 1
    """Of each layer; as many for each rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.num_experts % self.num_devices == 0, (self.num_experts, self.num_devices)

    @property
    def num_local(self) -> int:
        """Experts of a layer that one rank has."""
        return self.num_experts // self.num_devices

    def device(self, expert: Expert) -> int:
        return expert[1] // self.num_local

    def mask(self, layer: int, device: int, num_experts: int) -> NDArray[np.bool_]:  # noqa: ARG002
        return np.arange(num_experts) // self.num_local == device


@dataclass(frozen=True)
class Part:
    """What one process has of a model whose other experts are with other processes."""

    blocks: Blocks
    rank: int
