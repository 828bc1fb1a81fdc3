"""A temporary file for what memory does not hold."""

import os
import tempfile

from torch import Tensor

from runtime.errors import TransferError
from runtime.store.base import as_memoryview
from runtime.store.files import write_whole


class SpillFile:
    """An unnamed file, which disappears with the process, however it ends.

    Read and written with `pread` and `pwrite`, never memory-mapped.

    Args:
        name: beginning of its name, where the system shows one.
        cure: what to do if it cannot be written, besides another folder.

    Raises:
        TransferError: no file can be created in the folder.
    """

    def __init__(self, name: str, *, cure: str):
        self._where, self._cure = tempfile.gettempdir(), cure
        try:
            self._file = tempfile.TemporaryFile(prefix=name)  # noqa: SIM115
        except OSError as error:
            raise TransferError(
                f"{self._where}: {error.strerror}; set TMPDIR to a writable folder"
            ) from error
        self._handle = self._file.fileno()

    def write(self, source: Tensor, position: int, *, what: str) -> None:
        """Write a contiguous tensor of the CPU; raises TransferError."""
        try:
            write_whole(self._handle, as_memoryview(source), position)
        except OSError as error:
            raise TransferError(
                f"{what} cannot be written to {self._where}: {error.strerror}; set TMPDIR to "
                f"another folder, or {self._cure}"
            ) from error

    def flush(self, num_bytes: int) -> None:
        """Write all to the disk: pages that are not written yet cannot be dropped after a read."""
        os.ftruncate(self._handle, num_bytes)
        os.fsync(self._handle)

    def read(self, target: Tensor, position: int, *, what: str, drops_pages: bool = False) -> None:
        """Fill a contiguous tensor of the CPU; raises TransferError."""
        view, done = as_memoryview(target), 0
        try:
            while done < len(view):
                count = os.preadv(self._handle, [view[done:]], position + done)
                if not count:
                    raise TransferError(f"{what} in {self._where} was truncated after {done} bytes")
                done += count
        except OSError as error:
            raise TransferError(
                f"{what} cannot be read back from {self._where}: {error.strerror}"
            ) from error
        if drops_pages and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, position, done, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()
