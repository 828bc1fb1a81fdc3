"""Arenas, the memory of tiers, and the links that fill them from a store or the tier below."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.accelerator import Accelerator, Event
from runtime.policy.eviction.protocol import Expert
from runtime.policy.placement import ExpertPlacement
from runtime.policy.tier import TransferTask
from runtime.store.base import ExpertLayout, ExpertStore
from runtime.store.packed.matrix import ExpertWeights


class Arena:
    """A fixed allocation of slots; views of parameters are made once per slot.

    Args:
        layouts: of each layer; a slot holds the largest.
        pinned: allocate pinned memory, which a device copies without the CPU.
    """

    def __init__(
        self,
        layouts: Sequence[ExpertLayout],
        num_slots: int,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ):
        size = max(layout.num_bytes for layout in layouts)
        alignment = max(layout.alignment for layout in layouts)
        raw = torch.empty(
            num_slots * size + alignment, dtype=torch.uint8, device=device, pin_memory=pinned
        )
        if raw.device.type == "cpu" and not pinned:
            use_huge_pages(raw)
        start = -raw.data_ptr() % alignment
        self._slots = raw[start : start + num_slots * size].view(num_slots, size)
        self._layouts = layouts
        self._weights: dict[tuple[int, int], ExpertWeights] = {}
        self.num_slots = num_slots
        self.num_bytes = num_slots * size

    @property
    def device(self) -> torch.device:
        return self._slots.device

    def slot(self, index: int) -> Tensor:
        return self._slots[index]

    def chunk_ranges(self, layer: int) -> Sequence[Sequence[tuple[int, int]]]:
        return self._layouts[layer].chunk_ranges

    def weights(self, layer: int, index: int) -> ExpertWeights:
        """The slot as parameters of one of the layer's experts, without the expert dimension."""
        layout = self._layouts[layer]
        if not layout.views_are_weights:
            return layout.weights(self._slots[index])
        known = self._weights.get((layer, index))
        if known is None:
            known = self._weights[layer, index] = layout.weights(self._slots[index])
        return known

    def stacked_weights(self, layer: int) -> dict[str, Tensor]:
        """All slots as the layer's parameters, `(slots, ...)`: the expert dimension is the slot.

        Only for layouts whose slots are the parameters.
        """
        stacked = {}
        for name, first in self.weights(layer, 0).items():
            assert isinstance(first, Tensor)
            stride = self._slots.shape[1] // first.itemsize
            stacked[name] = first.as_strided(
                (self.num_slots, *first.shape), (stride, *first.stride())
            )
        return stacked


HUGE_PAGE_BYTES = 2 << 20


def use_huge_pages(memory: Tensor) -> None:
    """Ask Linux to map memory that was not touched yet in pages of 2 MiB; elsewhere do nothing.

    Products of one token read all of an expert once, and find its pages faster: with all experts
    resident a step took 3 to 4 % less time. Filling the memory for the first time takes less than
    half as long.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or memory.numel() < HUGE_PAGE_BYTES:
        return
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = memory.data_ptr() + memory.numel()
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Advice only: where it is not taken, pages are small, and nothing else is wrong.
    libc.madvise(start, end - start, mmap.MADV_HUGEPAGE)


class Link:
    """Fills slots of an arena. Thread-safe: workers transfer concurrently, to different slots."""

    def transfer(self, task: TransferTask) -> None:
        """Transfer the task's bytes; they are visible to every stream on return.

        Raises:
            TransferError: they did not arrive.
        """
        raise NotImplementedError

    def computed(self, slot: int) -> None:
        """Make the next transfer into the slot wait for the uses issued so far.

        Called on the model's thread after the last use. On the CPU the use has ended by then.
        """

    def close(self) -> None:
        """No transfer may be under way."""


class StoreLink(Link):
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

    def close(self) -> None:
        if self._closes:
            self._store.close()


class HostLink(Link):
    """Copies from one arena in host memory to another: a device tier's stand-in without one."""

    def __init__(self, source: Arena, target: Arena):
        self._source = source
        self._target = target

    def parts(self, task: TransferTask) -> list[tuple[Tensor, Tensor]]:
        """`(target, source)` bytes of each part of the task's chunks, uint8."""
        assert task.source_slot is not None
        target, source = self._target.slot(task.slot), self._source.slot(task.source_slot)
        ranges = self._target.chunk_ranges(task.expert[0])[task.first_chunk : task.end_chunk]
        return [(target[start:end], source[start:end]) for chunk in ranges for start, end in chunk]

    def transfer(self, task: TransferTask) -> None:
        for target, source in self.parts(task):
            target.copy_(source)


class AcceleratorLink(HostLink):
    """Copies from a host arena to one on a device, during the computation if it has streams.

    Two orders must hold. A computation may read a slot only after its copy has ended: `transfer`
    returns when the copy's event has passed, and only then does the policy core count the chunk as
    arrived. A copy may overwrite a slot only after the last computation with it has ended, which
    the CPU has launched but not awaited: `computed` records an event on the computing stream, and
    the copy stream waits for that event before it writes.
    """

    def __init__(self, source: Arena, target: Arena, accelerator: Accelerator):
        super().__init__(source, target)
        self._accelerator = accelerator
        self._stream = accelerator.make_stream()
        self._computed: dict[int, Event] = {}
        # The arena may lie where earlier work of the computing stream, still under way, writes.
        accelerator.synchronize()

    def transfer(self, task: TransferTask) -> None:
        fence = self._computed.pop(task.slot, None) if task.first_chunk == 0 else None
        with self._accelerator.use(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            for target, source in self.parts(task):
                self._accelerator.copy(target, source)
            done = self._accelerator.make_event()
            done.record(self._stream)
        # Releases the GIL while it waits, so that the model's thread continues.
        done.synchronize()

    def computed(self, slot: int) -> None:
        event = self._computed.get(slot)
        if event is None:
            event = self._computed[slot] = self._accelerator.make_event()
        event.record(self._accelerator.current_stream())

    def close(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True)
class ComputeTier:
    """The arenas that are computed from and the links that fill them, by device."""

    arenas: Sequence[Arena]
    links: Sequence[Link]
    placement: ExpertPlacement

    def weights(self, expert: Expert, slot: int) -> ExpertWeights:
        """The expert's parameters, on the device that it belongs to."""
        return self.arenas[self._of(expert)].weights(expert[0], slot)

    def computed(self, expert: Expert, slot: int) -> None:
        """The last use of the slot has been issued (`Link.computed`)."""
        self.links[self._of(expert)].computed(slot)

    def _of(self, expert: Expert) -> int:
        # One arena here may be one of many: a rank has its own experts only.
        return 0 if len(self.arenas) == 1 else self.placement.device(expert)
