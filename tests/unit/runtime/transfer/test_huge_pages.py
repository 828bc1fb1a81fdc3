"""Arenas are mapped in huge pages where the system has them."""

import re
from pathlib import Path

import pytest
import torch

from runtime.transfer.arena import HUGE_PAGE_BYTES, use_huge_pages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
MAPPING = re.compile(r"^(?P<start>\w+)-(?P<end>\w+) .*?^VmFlags:(?P<flags>.*?)$", re.M | re.S)
"""In `/proc/PID/smaps`."""


def read_flags(address: int) -> set[str]:
    """The kernel's flags of the mapping that an address lies in."""
    for found in MAPPING.finditer(Path("/proc/self/smaps").read_text()):
        if int(found["start"], 16) <= address < int(found["end"], 16):
            return set(found["flags"].split())
    raise AssertionError(f"no mapping of {address:x}")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no transparent huge pages")
def test_huge_pages__are_asked_for_where_memory_is_large() -> None:
    large, small = torch.empty(8 * HUGE_PAGE_BYTES, dtype=torch.uint8), torch.empty(64)
    middle = large.data_ptr() + large.numel() // 2
    before = read_flags(small.data_ptr())
    for memory in (large, small):
        use_huge_pages(memory)
    assert "hg" in read_flags(middle)
    assert read_flags(small.data_ptr()) == before
    large.fill_(7)
    assert bool((large == 7).all())
