"""Arenas are mapped in huge pages where the system has them."""

from pathlib import Path

import pytest
import torch

from runtime.transfer.arena import HUGE_PAGE_BYTES, use_huge_pages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def read_flags(address: int) -> set[str]:
    """The kernel's flags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(rest)
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
