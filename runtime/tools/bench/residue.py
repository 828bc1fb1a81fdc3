"""What the system keeps of files in its page cache, and asking it to forget."""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.profiling.bandwidth import drop


def forget(files: Sequence[Path]) -> None:
    """Asks the system to drop the files' pages."""
    for file in files:
        drop(file)


def remembered_bytes(files: Sequence[Path]) -> int | None:
    """Bytes of the files in the page cache; None where the system does not tell (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    return sum(map(_remembered, files))


def _remembered(file: Path) -> int:
    size = file.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        # Mapped, not touched: asking brings no page in.
        first = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.addressof(first), size, pages)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file}")
    return mmap.PAGESIZE * sum(byte & 1 for byte in pages.raw)
