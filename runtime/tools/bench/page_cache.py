"""Count files' bytes in the operating system's page cache."""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path


def cached_bytes(files: Sequence[Path]) -> int | None:
    """Count the files' bytes in the page cache; None on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    return sum(map(_cached_file_bytes, files))


def _cached_file_bytes(file: Path) -> int:
    size = file.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        # Mapping a file without touching it loads no page.
        first = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.addressof(first), size, pages)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file}")
    return mmap.PAGESIZE * sum(byte & 1 for byte in pages.raw)
