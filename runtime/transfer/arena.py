"""Arenas: the memory of tiers, in slots, on machines with several NUMA nodes near their device.

MoE-Infinity (sequence level) gives each node a memory pool (section 7) and measures a speedup of
1.4 (section 8.6).
"""

import ctypes
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.accelerator import find_numa_node, is_accelerator
from runtime.policy.budget import SlotCounts
from runtime.store.ggml.matrix import ExpertWeights, QuantisedExpert
from runtime.store.layout import ExpertLayout

MAX_GROUPS = 1023
"""Slots, each a group of rows, that PyTorch's kernel for CUDA takes in one launch."""


class SlotTable(NamedTuple):
    """Places of the experts of a layer."""

    places_E: Tensor
    """The place of each among `slots`, on the arena's device."""
    slots: range
    """Slots of an arena, from the layer's first to its last."""


class Arena:
    """A fixed allocation of slots; views of parameters are made once per slot.

    Args:
        layouts: of each layer.
        slots: numbers of slots by size; or a number of slots that hold the largest expert.
        pinned: allocate pinned memory, which a device copies without the CPU.
    """

    def __init__(
        self,
        layouts: Sequence[ExpertLayout],
        slots: SlotCounts | int,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ):
        alignment = max(layout.alignment for layout in layouts)
        if isinstance(slots, int):
            slots = {max(layout.num_bytes for layout in layouts): slots}
        sizes = [size for size in sorted(slots) for _ in range(slots[size])]
        self.num_slots = len(sizes)
        self.num_bytes = sum(sizes)
        self.first_slots = [bisect_left(sizes, layout.num_bytes) for layout in layouts]
        """Of each layer, the first slot that holds its experts; so do all that follow."""
        self._starts = list(accumulate(sizes, initial=0))
        with torch.inference_mode(False):  # in whatever mode a model is loaded: threads write here
            raw = torch.empty(
                self.num_bytes + alignment, dtype=torch.uint8, device=device, pin_memory=pinned
            )
        if raw.device.type == "cpu" and not pinned:
            use_huge_pages(raw)
        start = -raw.data_ptr() % alignment
        self._memory = raw[start : start + self.num_bytes]
        self._layouts = layouts
        self._weights: dict[tuple[int, int], ExpertWeights] = {}

    @property
    def device(self) -> torch.device:
        return self._memory.device

    def slot(self, index: int) -> Tensor:
        return self._memory[self._starts[index] : self._starts[index + 1]]

    def slot_bytes(self, index: int) -> int:
        return self._starts[index + 1] - self._starts[index]

    def chunk_ranges(self, layer: int) -> Sequence[Sequence[tuple[int, int]]]:
        return self._layouts[layer].chunk_ranges

    def weights(self, layer: int, index: int) -> ExpertWeights:
        """The slot as parameters of one of the layer's experts, without the expert dimension."""
        layout = self._layouts[layer]
        if not layout.views_are_weights:
            return layout.weights(self.slot(index))
        known = self._weights.get((layer, index))
        if known is None:
            known = self._weights[layer, index] = layout.weights(self.slot(index))
        return known

    def stacked_weights(self, layer: int) -> dict[str, Tensor]:
        """All slots as the layer's parameters, `(slots, ...)`: the expert dimension is the slot.

        Only for layouts whose slots are the parameters, and of one size.
        """
        stacked, weights = {}, self.weights(layer, 0)
        assert not isinstance(weights, QuantisedExpert)
        for name, first in weights.items():
            assert isinstance(first, Tensor)
            stride = self._starts[1] // first.itemsize
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


NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def find_near_cpus(
    device: torch.device, number: int, *, nodes: Path = NODES
) -> frozenset[int] | None:
    """Processors of the device's node; None where there is one node, or none is known.

    CPU "devices", which are nowhere in particular, take the nodes in turn: `number` is the
    device's.
    """
    cpus_by_node = {node: cpus for node, cpus in _nodes(nodes).items() if cpus}
    if len(cpus_by_node) < 2:
        return None
    if is_accelerator(device):
        node = find_numa_node(device, PCI)
        return None if node is None else cpus_by_node.get(node)
    return cpus_by_node[sorted(cpus_by_node)[number % len(cpus_by_node)]]


def _nodes(folder: Path) -> dict[int, frozenset[int]]:
    """Node to those of its processors that this process may use."""
    if not folder.is_dir() or not hasattr(os, "sched_getaffinity"):
        return {}
    usable = os.sched_getaffinity(0)
    return {
        int(node.name.removeprefix("node")): parse_cpu_list((node / "cpulist").read_text()) & usable
        for node in folder.glob("node[0-9]*")
    }


def parse_cpu_list(cpulist: str) -> frozenset[int]:
    """The kernel's notation: `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


@contextmanager
def run_near(cpus: frozenset[int] | None) -> Iterator[None]:
    """Run this thread on the given processors within the context.

    Pages that it touches first, or pins, are allocated on their node.
    """
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
