"""Files whose bytes the page cache does not hold."""

import os
from pathlib import Path

import pytest

from runtime.tools.bench.tasks import cached_bytes


def uncached_zeros(file: Path, num_bytes: int) -> Path:
    """Writes a file that is on the disk and not in memory; skips the test where none can be."""
    file.write_bytes(bytes(num_bytes))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes([file]):
        pytest.skip("this file system lives in memory")
    return file
