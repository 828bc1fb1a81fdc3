"""The interface of stores, which read chunks of experts into slots, and reading without a cache."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runtime.store.files import ALIGNMENT, BLOCK, FileRange, FileReader
from runtime.store.ggml.library import explain_missing
from runtime.store.ggml.matrix import ExpertWeights
from runtime.store.layout import ExpertLayout
from runtime.store.packed.coding import HQQ, STORED

READERS = 2
"""A link's thread, and the computation that reads for itself while it waits."""


class ExpertStore:
    """Thread-safe; holds no expert itself."""

    experts_per_layer: Sequence[int]
    layouts: Sequence[ExpertLayout]
    """Layouts of the layers with routed experts, bottom first."""
    scratch_bytes: int
    """Largest buffer that a read needs in addition to the slot; 0 without conversion."""
    files: FileReader
    """The open files, for reads of extents too."""

    _multiplies_on_host = False

    def use_kernels(self, *, wanted: bool, on_host: bool) -> None:
        """Let quantised matrices be multiplied as they are stored, where there are products.

        Args:
            on_host: In host memory below a device.
        """
        self.layouts = [replace(layout, uses_kernels=wanted) for layout in self.layouts]
        self._multiplies_on_host = on_host

    @property
    def host_layouts(self) -> list[ExpertLayout]:
        """Layouts of slots in host memory below a device, whose experts the processor may take."""
        on_host = self._multiplies_on_host
        return [replace(layout, uses_kernels=on_host) for layout in self.layouts]

    @property
    def num_layers(self) -> int:
        return len(self.layouts)

    @property
    def num_experts(self) -> int:
        """The largest number of experts of any layer; ids at or above a layer's own mean "skip"."""
        return max(self.experts_per_layer)

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        """Fills the chunks' parts of `slot`, uint8 on the CPU, at least `num_bytes` long.

        Raises:
            TransferError: the bytes did not arrive, or are not those that were stored.
        """
        raise NotImplementedError

    def extents(self, layer: int, expert: int) -> list[FileRange] | None:
        """Returns where the bytes of each of the slot's ranges (`chunk_ranges`) are, in order.

        None: something is converted on arrival, so that only `read` can fill a slot.
        """
        return None

    def close(self) -> None:
        """Closes the files; no read may be under way."""
        self.files.close()


def max_slot_bytes(store: ExpertStore) -> int:
    """Size of a slot that any expert of any layer fits."""
    return max(layout.num_bytes for layout in store.layouts)


def slot_sizes(layouts: Sequence[ExpertLayout]) -> list[int]:
    """Return the size of a slot for experts of each layer.

    Slots of plain weights are all alike, so that they can be parameters of one tensor.
    """
    sizes = [layout.num_bytes for layout in layouts]
    are_plain = all(layout.is_plain for layout in layouts)
    return [max(sizes)] * len(sizes) if are_plain else sizes


def max_decoded_bytes(store: ExpertStore) -> int:
    """Return the memory that one expert's decoded parameters need in addition to its slot."""
    return max(layout.decoded_bytes for layout in store.layouts)


def name_format(layout: ExpertLayout) -> str:
    """Returns the format of most bytes of an expert in memory, of which a budget is a share."""
    first = layout.matrices[0]
    stored = [part for part in layout.matrices if part.coding.kind == STORED]
    part = max(stored, key=lambda part: part.num_bytes, default=first)
    return part.coding.name(layout.dtypes[part.parameter])


def describe_formats(layouts: Sequence[ExpertLayout]) -> str | None:
    """Returns why experts are decoded before each use; else None."""
    first = next((layout for layout in layouts if not layout.views_are_weights), None)
    if first is None:
        return None
    if first.decoders:
        return (
            f"experts stay quantised in memory, as the checkpoint has them ({name_format(first)}), "
            "and are decoded before each use; moecast pack quantise=int4 makes experts that are "
            "multiplied as they are"
        )
    if any(part.coding.kind == HQQ for part in first.parts):
        reason = "hqq has no kernel"
    elif not first.uses_kernels:
        reason = "this model or its device has no kernels for them"
    else:
        reason = explain_missing() or "ggml has no kernel for one of their types"
    return f"experts are decoded before each use, which takes longer than the product; {reason}"


def as_memoryview(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, for the reads of the operating system."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def allocate_aligned(
    num_bytes: int, alignment: int = BLOCK, *, device: torch.device | None = None
) -> Tensor:
    """Return uninitialised memory, uint8 `(num_bytes,)`, at a multiple of the alignment."""
    raw = torch.empty(num_bytes + alignment, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes]


class OnDemandReader:
    """A source of experts without arena, threads and policy: it reads each when it is requested.

    With `keep_bytes`, the first experts that fit stay in memory; the others are never kept.
    """

    def __init__(self, store: ExpertStore, *, keep_bytes: int = 0):
        self._store = store
        self._slot_bytes = max_slot_bytes(store)
        # Two, so that an expert stays valid while the next is being read.
        self._slots = [allocate_aligned(self._slot_bytes, ALIGNMENT) for _ in range(2)]
        self._current = 0
        self._max_kept = keep_bytes // self._slot_bytes
        self._kept: dict[tuple[int, int], Tensor] = {}

    def pin(self, layer: int, expert: int) -> ExpertWeights:
        """Return the expert's parameters, valid until the next but one is requested."""
        layout = self._store.layouts[layer]
        slot = self._kept.get((layer, expert))
        if slot is None:
            is_kept = len(self._kept) < self._max_kept
            if is_kept:
                slot = allocate_aligned(self._slot_bytes, ALIGNMENT)
            else:
                self._current = 1 - self._current
                slot = self._slots[self._current]
            self._store.read(layer, expert, range(len(layout.chunk_bytes)), slot)
            if is_kept:
                self._kept[layer, expert] = slot
        return layout.weights(slot)

    def ready(self, layer: int, wanted: list[int]) -> Iterator[dict[int, ExpertWeights]]:
        for expert in wanted:
            yield {expert: self.pin(layer, expert)}
