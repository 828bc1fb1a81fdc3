"""Places outside of the computing memory from which dense weights are read, bitwise.

A tensor that the checkpoint stores as the model computes with it is read from there, in place. Any
other (renamed, converted, cast) is written once to a temporary file (`SpillFile`), or, for a model
on an accelerator, kept in pinned host memory like all others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runtime.accelerator import Accelerator, Stream
from runtime.store.base import allocate_aligned
from runtime.store.files import FileReader, align
from runtime.store.gguf.header import is_gguf
from runtime.store.model_check import list_weight_files
from runtime.store.packed.coding import Coding, decode
from runtime.store.spill import SpillFile
from runtime.store.tensor_index import StoredTensor, read_tensor_index

Read = Callable[[Tensor], None]
"""Fills `target`, uint8 on the model's device; raises TransferError."""


def _read_pinned(pinned: Tensor, accelerator: Accelerator, stream: Stream, target: Tensor) -> None:
    """Copy from pinned host memory on a separate stream."""
    with accelerator.use(stream):
        accelerator.copy(target, pinned)
        done = accelerator.make_event()
        done.record(stream)
    done.synchronize()


def _read_coded(
    read: Read, num_bytes: int, coding: Coding, dtype: torch.dtype, target: Tensor
) -> None:
    """Read the codes of quantised weights, and decode them."""
    stored = torch.empty(num_bytes, dtype=torch.uint8, device=target.device)
    read(stored)
    decode(coding, stored, target.view(dtype))


@dataclass(frozen=True)
class DenseCodes:
    """Codes of dense weights that were quantised, uint8, by name in the model."""

    coding: Coding
    stored: dict[str, Tensor]
    """Empty once the weights are placed."""


@dataclass(frozen=True)
class DenseExtent:
    """A part of a buffer, and what fills it."""

    read: Read
    start: int
    num_bytes: int
    stored_bytes: int
    """Bytes to read; fewer than `num_bytes` of quantised weights."""
    is_spilled: bool = False
    """They are in the temporary file as they are."""


def read_extents(extents: Sequence[DenseExtent], buffer: Tensor) -> None:
    """Fill a buffer, uint8.

    Raises:
        TransferError: the bytes did not arrive.
    """
    for extent in extents:
        extent.read(buffer[extent.start : extent.start + extent.num_bytes])


class DenseStore:
    """Makes the places of a model's dense weights; closes them together.

    Args:
        folder: the checkpoint.
        files: reads its files.
        accelerator: the device that the model computes on; None: the CPU.
        codes: codes that some of the weights were decoded from, to read in their place.
    """

    def __init__(
        self,
        folder: Path,
        files: FileReader,
        *,
        accelerator: Accelerator | None = None,
        codes: DenseCodes | None = None,
    ):
        self._codes = codes
        self._files = files
        self._accelerator = accelerator
        self._stream = None if accelerator is None else accelerator.make_stream()
        self._stored: Mapping[str, StoredTensor] = (
            {} if is_gguf(folder) else read_tensor_index(list_weight_files(folder))
        )
        self._spill = SpillFile("moecast-dense-", cure="keep dense weights with dense=memory")
        self.spilled_bytes = 0
        """Bytes in the temporary file."""

    def place_all(self, tensors: Mapping[str, Tensor]) -> list[DenseExtent]:
        """Return places of tensors that are read together, one after another into one buffer.

        Each begins at a multiple of `ALIGNMENT`. Neighbours in the temporary file are one read.

        Args:
            tensors: by name in the model.

        Raises:
            TransferError: the checkpoint cannot be read, or the temporary file not written.
        """
        extents: list[DenseExtent] = []
        start = 0
        for name, tensor in tensors.items():
            own, end = self._place(name, tensor, start), start + align(tensor.nbytes)
            last = extents[-1] if extents else None
            if own.is_spilled and last is not None and last.is_spilled:
                size = end - last.start
                extents[-1] = replace(last, num_bytes=size, stored_bytes=size)
            else:
                extents.append(own)
            start = end
        if self.spilled_bytes:
            self._spill.flush(self.spilled_bytes)
        return extents

    def _place(self, name: str, tensor: Tensor, start: int) -> DenseExtent:
        codes = None if self._codes is None else self._codes.stored.get(name)
        if self._codes is not None and codes is not None:
            decoding = self._place_bytes(name, codes), codes.nbytes, self._codes.coding
            read = partial(_read_coded, *decoding, tensor.dtype)
            return DenseExtent(read, start, tensor.nbytes, codes.nbytes)
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        stored, size = self._stored.get(name), tensor.nbytes
        if self._stream is None and stored is not None and stored.num_bytes == size:
            found = allocate_aligned(size)
            stored.read(self._files, found)
            if torch.equal(found, source):
                return DenseExtent(partial(stored.read, self._files), start, size, size)
        is_spilled = self._stream is None
        return DenseExtent(self._place_bytes(name, source), start, size, size, is_spilled)

    def _place_bytes(self, name: str, source: Tensor) -> Read:
        if self._accelerator is not None and self._stream is not None:
            pins = self._accelerator.pins_memory
            pinned = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=pins).copy_(source)
            return partial(_read_pinned, pinned, self._accelerator, self._stream)
        position = self.spilled_bytes
        self._spill.write(source, position, what=name)
        self.spilled_bytes += align(source.nbytes)
        return partial(self._spill.read, position=position, what=name, drops_pages=True)

    def close(self) -> None:
        """Close the files; no read may be under way."""
        self._files.close()
        self._spill.close()
