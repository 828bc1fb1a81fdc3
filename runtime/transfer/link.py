"""Links fill an arena: from a store, or from the arena of the tier below."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.policy.eviction.protocol import Expert
from runtime.policy.placement import ExpertPlacement
from runtime.policy.tier import TransferTask
from runtime.store.base import ExpertStore
from runtime.transfer.arena import Arena


class Link(Protocol):
    """Fills slots of an arena. Thread-safe: workers transfer concurrently, to different slots."""

    def transfer(self, task: TransferTask) -> None:
        """Transfer the task's bytes; they are visible to every stream on return.

        Raises:
            TransferError: they did not arrive.
        """

    def computed(self, slot: int) -> None:
        """Make the next transfer into the slot wait for the uses issued so far.

        Called on the model's thread after the last use.
        """

    def close(self) -> None:
        """Close the link; no transfer may be active."""


class StoreLink:
    """Reads chunks of a store into an arena in host memory.

    Args:
        closes: the store is this link's own; off where others read from it too.
    """

    def __init__(self, store: ExpertStore, arena: Arena, *, closes: bool = True):
        self._store = store
        self._arena = arena
        self._closes = closes

    def transfer(self, task: TransferTask) -> None:
        layer, expert = task.expert
        chunks = range(task.first_chunk, task.end_chunk)
        self._store.read(layer, expert, chunks, self._arena.slot(task.slot))

    def computed(self, slot: int) -> None:
        """Do nothing: the CPU's computation has ended when this is called."""

    def close(self) -> None:
        if self._closes:
            self._store.close()


class HostLink:
    """Copies from one arena in host memory to another: a device tier's stand-in without one."""

    def __init__(self, source: Arena, target: Arena):
        self._source = source
        self._target = target

    def parts(self, task: TransferTask) -> list[tuple[Tensor, Tensor]]:
        """`(target, source)` bytes of each part of the task's chunks."""
        return copy_parts(task, self._source, self._target)

    def transfer(self, task: TransferTask) -> None:
        for target, source in self.parts(task):
            target.copy_(source)

    def computed(self, slot: int) -> None:
        """Do nothing, as in `StoreLink`."""

    def close(self) -> None:
        """Do nothing: there are no files."""


def copy_parts(task: TransferTask, source: Arena, target: Arena) -> list[tuple[Tensor, Tensor]]:
    """`(target, source)` bytes of each part of the task's chunks, uint8."""
    assert task.source_slot is not None
    to, of = target.slot(task.slot), source.slot(task.source_slot)
    ranges = target.chunk_ranges(task.expert[0])[task.first_chunk : task.end_chunk]
    return [(to[start:end], of[start:end]) for chunk in ranges for start, end in chunk]


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
