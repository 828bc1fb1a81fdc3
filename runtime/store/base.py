"""The interface of stores, which read chunks of experts into slots."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from runtime.store.direct import BLOCK


class ExpertLayout(Protocol):
    """The layout of a slot, for code that fills it and code that computes with it."""

    @property
    def num_bytes(self) -> int:
        """Size of the slot, a multiple of the alignment."""

    @property
    def alignment(self) -> int:
        """Alignment of the slot's address in bytes: 64 for kernels, 4096 for direct reads."""

    @property
    def chunk_bytes(self) -> Sequence[int]:
        """Bytes that each chunk moves, in the order in which chunks are fetched."""

    @property
    def chunk_ranges(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Each chunk's parts of the slot as `(start, end)` bytes: what a link copies on."""

    @property
    def views_are_weights(self) -> bool:
        """Whether `weights` returns views of the slot, which can be made once and kept."""

    @property
    def decoded_bytes(self) -> int:
        """Memory that `weights` needs in addition to the slot; 0 for views."""

    def weights(self, slot: Tensor) -> dict[str, Tensor]:
        """The expert's parameters from the slot's bytes, uint8 `(num_bytes,)`, on its device."""


class ExpertStore(Protocol):
    """Thread-safe; holds no expert itself."""

    @property
    def num_layers(self) -> int: ...

    @property
    def experts_per_layer(self) -> Sequence[int]:
        """Experts of each layer."""

    @property
    def num_experts(self) -> int:
        """The largest number of experts of any layer; ids at or above a layer's own mean "skip"."""

    @property
    def layouts(self) -> Sequence[ExpertLayout]:
        """Layouts of the layers with routed experts, bottom first."""

    @property
    def scratch_bytes(self) -> int:
        """Largest buffer that a read needs in addition to the slot; 0 without conversion."""

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        """Fills the chunks' parts of `slot`, uint8 on the CPU, at least `num_bytes` long.

        Raises:
            TransferError: the bytes did not arrive, or are not those that were stored.
        """

    def close(self) -> None:
        """Closes the files; no read may be under way."""


def max_slot_bytes(store: ExpertStore) -> int:
    """Size of a slot that any expert of any layer fits."""
    return max(layout.num_bytes for layout in store.layouts)


def max_decoded_bytes(store: ExpertStore) -> int:
    """Return the memory that one expert's decoded parameters need in addition to its slot."""
    return max(layout.decoded_bytes for layout in store.layouts)


def as_memoryview(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, for the reads of the operating system."""
    return memoryview(tensor.view(torch.uint8).reshape(-1).numpy())


def allocate_aligned(num_bytes: int, alignment: int = BLOCK) -> Tensor:
    """Return uninitialised memory, uint8 `(num_bytes,)`, at a multiple of the alignment."""
    raw = torch.empty(num_bytes + alignment, dtype=torch.uint8)
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes]
