"""Where experts are computed: one device's arena and link, or those of several."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from runtime.policy.eviction.protocol import Expert
from runtime.policy.placement import ExpertPlacement
from runtime.transfer.arena import Arena
from runtime.transfer.link import Link


@dataclass(frozen=True)
class ComputeTier:
    """The arenas that are computed from and the links that fill them, by device."""

    arenas: Sequence[Arena]
    links: Sequence[Link]
    placement: ExpertPlacement

    def weights(self, expert: Expert, slot: int) -> dict[str, Tensor]:
        """The expert's parameters, on the device that it belongs to."""
        return self.arenas[self._of(expert)].weights(expert[0], slot)

    def computed(self, expert: Expert, slot: int) -> None:
        """The last use of the slot has been issued (`Link.computed`)."""
        self.links[self._of(expert)].computed(slot)

    def _of(self, expert: Expert) -> int:
        # One arena here may be one of many: a rank has its own experts only.
        return 0 if len(self.arenas) == 1 else self.placement.device(expert)
