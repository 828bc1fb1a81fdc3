"""Whole reads and writes at a position of a file, without its file offset."""

import os


def write_whole(descriptor: int, view: memoryview, position: int) -> None:
    """Writes all bytes of `view` from `position` on.

    Raises:
        OSError: The disk is full or broken.
    """
    while view:
        done = os.pwrite(descriptor, view, position)
        view, position = view[done:], position + done


def read_whole(descriptor: int, view: memoryview, position: int) -> int:
    """Fills `view` from `position` on; returns the number of bytes, fewer at the end of the file.

    Raises:
        OSError: The disk is broken.
    """
    total = 0
    while total < len(view):
        done = os.preadv(descriptor, [view[total:]], position + total)
        if not done:
            break
        total += done
    return total
