"""How much of a file the system keeps in memory."""

import ctypes
import mmap
from pathlib import Path


def resident_bytes(path: Path) -> int:
    """Bytes of the file in the page cache, by the system's own `mincore`."""
    size = path.stat().st_size
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
