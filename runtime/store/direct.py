"""Direct reads (O_DIRECT) of any range of a file into any memory, past the page cache.

The system reads whole blocks into memory that is aligned as they are. So the blocks that lie wholly
inside the range are read straight into the target, from its first aligned address on, and then
moved by less than a block to where they belong; the blocks at its edges go through a small buffer.
All of it is one call. Where range and target are aligned (a packed store), nothing is moved.
"""

import ctypes
import errno
import mmap
import os
import threading

BLOCK = 4096
"""Bytes. Disks and file systems ask for 512 or 4096 (the size of a page); 4096 does for both."""

SMALLEST = 64 << 10
"""Below this many bytes, the blocks at the edges would cost more than the page cache does."""

O_DIRECT = getattr(os, "O_DIRECT", 0)
"""0 where the system has none (macOS)."""

_edges = threading.local()


class EndOfFile(Exception):
    """The file ends before the range does."""


def address(target: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(target))


def _edge_blocks() -> memoryview:
    """Three blocks of this thread's own; a map is aligned to pages."""
    if not hasattr(_edges, "blocks"):
        _edges.blocks = memoryview(mmap.mmap(-1, 3 * BLOCK))
    return _edges.blocks


def _fill(descriptor: int, offset: int, parts: list[memoryview], needed: int) -> None:
    """Reads from `offset` into the parts, one after another, at least `needed` bytes.

    The last block of a file may be a part of one, hence `needed`.
    """
    done = 0
    while done < needed:
        count = os.preadv(descriptor, parts, offset + done)
        if count == 0:
            raise EndOfFile
        if count % BLOCK and done + count < needed:
            # The file's end, or a network file system that returned less than requested: the
            # next direct read could not start here. Reads through the page cache can.
            raise OSError(errno.EINVAL, "a direct read ended inside a block")
        done += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts and count:
            parts[0] = parts[0][count:]


def read_direct(descriptor: int, offset: int, target: memoryview) -> None:
    """Fills `target`, at least `SMALLEST` bytes, from `offset` of a file opened with O_DIRECT.

    Raises:
        EndOfFile: the file is shorter.
        OSError: EINVAL where the file system allows no direct reads or cuts them short, EIO and
            others.
    """
    size = len(target)
    assert size >= SMALLEST
    place = address(target)
    before = offset % BLOCK
    if not before and not place % BLOCK and not size % BLOCK:
        _fill(descriptor, offset, [target], size)
        return
    start = offset - before
    num_blocks = -(-(before + size) // BLOCK)
    aligned = -place % BLOCK
    # Of the range's blocks the first goes to the edges, and the last one or two: as many as lie
    # beyond the last aligned block of the target.
    inside = min(num_blocks - 2, (size - aligned) // BLOCK) * BLOCK
    after = num_blocks * BLOCK - BLOCK - inside
    edges = _edge_blocks()
    head, tail = edges[:BLOCK], edges[BLOCK : BLOCK + after]
    middle = target[aligned : aligned + inside]
    _fill(descriptor, start, [head, middle, tail], before + size)
    in_head = BLOCK - before
    ctypes.memmove(place + in_head, place + aligned, inside)
    target[:in_head] = head[before:]
    target[in_head + inside :] = tail[: size - in_head - inside]
