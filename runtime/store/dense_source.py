"""Places outside of the computing memory from which dense weights are read, bitwise.

A tensor that the checkpoint stores as the model computes with it is read from there, in place. Any
other (renamed, converted, cast) is written once to an unnamed temporary file, or, for a model on an
accelerator, kept in pinned host memory like all others.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from runtime.accelerator import Accelerator, Stream
from runtime.errors import TransferError
from runtime.store.base import allocate_aligned, as_memoryview
from runtime.store.files import FileReader, align, read_whole, write_whole
from runtime.store.gguf.header import is_gguf
from runtime.store.model_check import list_weight_files
from runtime.store.packed.coding import Coding, decode
from runtime.store.tensor_index import StoredTensor, read_tensor_index


class DenseTensor(Protocol):
    """The bytes of one tensor, outside of the computing memory."""

    def read(self, target: Tensor) -> None:
        """Fill `target`, uint8 with as many bytes, on the model's device.

        Raises:
            TransferError: the bytes did not arrive.
        """


class CheckpointTensor:
    """A tensor in a safetensors file, read past the page cache as experts are."""

    def __init__(self, files: FileReader, stored: StoredTensor):
        self._files = files
        self._stored = stored

    def read(self, target: Tensor) -> None:
        stored = self._stored
        self._files.read(stored.file, stored.offset, as_memoryview(target), what=stored.key)


class SpilledTensor:
    """A tensor in an unnamed temporary file."""

    def __init__(self, descriptor: int, offset: int, name: str):
        self._descriptor = descriptor
        self._offset = offset
        self._name = name

    def write(self, source: Tensor) -> None:
        """Write the tensor's bytes.

        Raises:
            TransferError: the disk is full or broken.
        """
        try:
            write_whole(self._descriptor, as_memoryview(source), self._offset)
        except OSError as error:
            raise TransferError(
                f"{self._name} cannot be written to {tempfile.gettempdir()}: {error.strerror}; "
                "set TMPDIR to another folder, or keep dense weights with dense=memory"
            ) from error

    def read(self, target: Tensor) -> None:
        view = as_memoryview(target)
        try:
            size = read_whole(self._descriptor, view, self._offset)
        except OSError as error:
            raise TransferError(
                f"{self._name} cannot be read back from {tempfile.gettempdir()}: {error.strerror}"
            ) from error
        if size < len(view):
            raise TransferError(f"{self._name} in {tempfile.gettempdir()} was truncated")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, self._offset, size, os.POSIX_FADV_DONTNEED)


class PinnedTensor:
    """Bytes in pinned host memory, copied to a device on a separate stream."""

    def __init__(self, source: Tensor, accelerator: Accelerator, stream: Stream):
        self._bytes = torch.empty(
            source.nbytes, dtype=torch.uint8, pin_memory=accelerator.pins_memory
        )
        self._bytes.copy_(source)
        self._accelerator = accelerator
        self._stream = stream

    def read(self, target: Tensor) -> None:
        with self._accelerator.use(self._stream):
            self._accelerator.copy(target, self._bytes)
            done = self._accelerator.make_event()
            done.record(self._stream)
        done.synchronize()


@dataclass(frozen=True)
class CodedTensor:
    """A quantised tensor: its codes are read, then decoded to the weights' dtype."""

    codes: DenseTensor
    num_bytes: int
    """Bytes of the codes."""
    coding: Coding
    dtype: torch.dtype

    def read(self, target: Tensor) -> None:
        stored = torch.empty(self.num_bytes, dtype=torch.uint8, device=target.device)
        self.codes.read(stored)
        decode(self.coding, stored, target.view(self.dtype))


@dataclass(frozen=True)
class DenseCodes:
    """Codes of dense weights that were quantised, uint8, by name in the model."""

    coding: Coding
    stored: Mapping[str, Tensor]


@dataclass(frozen=True)
class DenseExtent:
    """A part of a buffer, and where its bytes are."""

    place: DenseTensor
    start: int
    num_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Bytes to read; fewer than `num_bytes` of quantised weights."""
        return self.place.num_bytes if isinstance(self.place, CodedTensor) else self.num_bytes


def read_extents(extents: Sequence[DenseExtent], buffer: Tensor) -> None:
    """Fill a buffer, uint8.

    Raises:
        TransferError: the bytes did not arrive.
    """
    for extent in extents:
        extent.place.read(buffer[extent.start : extent.start + extent.num_bytes])


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
        self._spill = tempfile.TemporaryFile(prefix="moecast-dense-")  # noqa: SIM115
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
            place, end = self._place(name, tensor), start + align(tensor.nbytes)
            last = extents[-1] if extents else None
            if isinstance(place, SpilledTensor) and last and isinstance(last.place, SpilledTensor):
                extents[-1] = replace(last, num_bytes=end - last.start)
            else:
                extents.append(DenseExtent(place, start, tensor.nbytes))
            start = end
        if self.spilled_bytes:
            # Pages that are not written yet cannot be dropped after a read.
            os.ftruncate(self._spill.fileno(), self.spilled_bytes)
            os.fsync(self._spill.fileno())
        return extents

    def _place(self, name: str, tensor: Tensor) -> DenseTensor:
        codes = None if self._codes is None else self._codes.stored.get(name)
        if self._codes is not None and codes is not None:
            place = self._place_bytes(name, codes)
            return CodedTensor(place, codes.nbytes, self._codes.coding, tensor.dtype)
        source = _flatten_bytes(tensor)
        stored = self._stored.get(name)
        if self._stream is None and stored is not None and stored.num_bytes == source.nbytes:
            in_checkpoint = CheckpointTensor(self._files, stored)
            found = allocate_aligned(source.nbytes)
            in_checkpoint.read(found)
            if torch.equal(found, source):
                return in_checkpoint
        return self._place_bytes(name, source)

    def _place_bytes(self, name: str, source: Tensor) -> PinnedTensor | SpilledTensor:
        if self._accelerator is not None and self._stream is not None:
            return PinnedTensor(source, self._accelerator, self._stream)
        spilled = SpilledTensor(self._spill.fileno(), self.spilled_bytes, name)
        spilled.write(source)
        self.spilled_bytes += align(source.nbytes)
        return spilled

    def close(self) -> None:
        """Close the files; no read may be under way."""
        self._files.close()
        self._spill.close()


def _flatten_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
