"""Offload targets for keys and values that exceed the memory budget: a file or host memory.

Shape suffixes: T tokens, B rows, H heads, D width of a head.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import TransferError
from runtime.store.positioned import read_whole, write_whole


class DiskOffload:
    """An unnamed temporary file, which disappears with the process, however it ends.

    Read and written with `pread` and `pwrite`, never memory-mapped.

    Raises:
        TransferError: no file can be created in the folder.
    """

    def __init__(self, folder: Path | None):
        self._where = Path(tempfile.gettempdir()) if folder is None else folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="moecast-kv-")  # noqa: SIM115
        except OSError as error:
            raise TransferError(
                f"kv_folder={self._where}: {error.strerror}; give a writable folder"
            ) from error
        self._handle = self._file.fileno()
        self._shape: torch.Size | None = None
        self._dtype = torch.float32

    def write(self, first: int, part_TBHD: Tensor) -> None:
        """Write tokens from index `first` on; all earlier ones have been written."""
        self._shape, self._dtype = part_TBHD.shape[1:], part_TBHD.dtype
        view = memoryview(_as_bytes(part_TBHD.cpu().contiguous()).numpy())
        position = first * self._shape.numel() * self._dtype.itemsize
        try:
            write_whole(self._handle, view, position)
        except OSError as error:
            raise TransferError(
                f"a KV cache cannot be written to {self._where}: {error.strerror}; give "
                "another folder with kv_folder=PATH, a larger kv_budget, or a smaller n"
            ) from error

    def read(self, num_tokens: int) -> Tensor:
        """Read the first tokens as `[T, B, H, D]` on the CPU."""
        assert self._shape is not None
        buffer = torch.empty((num_tokens, *self._shape), dtype=self._dtype)
        view = memoryview(_as_bytes(buffer).numpy())
        try:
            size = read_whole(self._handle, view, 0)
        except OSError as error:
            raise TransferError(
                f"a KV cache cannot be read back from {self._where}: {error.strerror}"
            ) from error
        if size < len(view):
            raise TransferError(f"a KV cache in {self._where} was truncated after {size} bytes")
        return buffer

    def close(self) -> None:
        self._file.close()


class HostOffload:
    """Host memory for a model on a GPU, pinned so that copies overlap with computation."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens
        self._memory: Tensor | None = None

    def write(self, first: int, part_TBHD: Tensor) -> None:
        if self._memory is None:
            self._memory = torch.empty(
                (self._num_tokens, *part_TBHD.shape[1:]),
                dtype=part_TBHD.dtype,
                pin_memory=part_TBHD.is_cuda,
            )
        self._memory[first : first + len(part_TBHD)].copy_(part_TBHD)

    def read(self, num_tokens: int) -> Tensor:
        assert self._memory is not None
        return self._memory[:num_tokens]

    def close(self) -> None:
        self._memory = None


OffloadTarget = DiskOffload | HostOffload
"""Append-only storage for the keys or the values of one cache layer."""


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
