"""A temporary file for what memory does not hold."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from runtime.errors import TransferError
from runtime.store.base import as_memoryview
from runtime.store.files import EndOfFile, read_parts, write_whole

LARGE_FILES = "/var/tmp"
"""Folder of large temporary files, on a disk where /tmp is in memory (systemd, file-hierarchy)."""
MOUNTS = Path("/proc/self/mountinfo")


def is_in_memory(folder: str | Path) -> bool:
    """Return whether files in a folder are memory; False where that is not known."""
    device = Path(folder).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    kinds = {mount[mount.index("-") + 1] for mount in mounts if mount[2] == number}
    return not kinds.isdisjoint({"tmpfs", "ramfs"})


class SpillFile:
    """An unnamed file, which disappears with the process, however it ends.

    Read and written with `pread` and `pwrite`, never memory-mapped. It is in `LARGE_FILES` where
    the usual folder is in memory; where both are, nothing can be written.

    Args:
        name: beginning of its name, where the system shows one.
        cure: what to do if it cannot be written, besides another folder.

    Raises:
        TransferError: no file can be created in the folder.
    """

    def __init__(self, name: str, *, cure: str):
        folders = [tempfile.gettempdir(), LARGE_FILES]
        on_disk = [
            folder for folder in folders if Path(folder).exists() and not is_in_memory(folder)
        ]
        self._where, self._cure, self._is_on_disk = [*on_disk, *folders][0], cure, bool(on_disk)
        try:
            self._file = tempfile.TemporaryFile(prefix=name, dir=self._where)  # noqa: SIM115
        except OSError as error:
            raise TransferError(
                f"{self._where}: {error.strerror}; set TMPDIR to a writable folder"
            ) from error
        self._handle = self._file.fileno()

    def write(self, source: Tensor, position: int, *, what: str) -> None:
        """Write a contiguous tensor of the CPU; raises TransferError."""
        with self._explain_writing(what):
            if not self._is_on_disk:
                raise OSError(errno.ENODEV, "its files are in memory")
            write_whole(self._handle, as_memoryview(source), position)

    @contextmanager
    def _explain_writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TransferError(
                f"{what} cannot be written to {self._where}: {error.strerror}; set TMPDIR to "
                f"another folder, or {self._cure}"
            ) from error

    def flush(self, num_bytes: int) -> None:
        """Write all to the disk: pages that are not written yet cannot be dropped after a read.

        Raises TransferError: a disk may be full, or fail, only now.
        """
        with self._explain_writing(f"{num_bytes} bytes"):
            os.ftruncate(self._handle, num_bytes)
            os.fsync(self._handle)

    def read(self, target: Tensor, position: int, *, what: str, drops_pages: bool = False) -> None:
        """Fill a contiguous tensor of the CPU; raises TransferError."""
        view = as_memoryview(target)
        try:
            read_parts(self._handle, position, [view], len(view))
        except EndOfFile as end:
            raise TransferError(f"{what} in {self._where} was truncated {end}") from end
        except OSError as error:
            raise TransferError(
                f"{what} cannot be read back from {self._where}: {error.strerror}"
            ) from error
        if drops_pages and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, position, len(view), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()
