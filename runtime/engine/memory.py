"""Memory of this process: its limit, its peak, and the release of unused memory."""

import ctypes
import functools
import gc
import linecache
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

MADV_DONTNEED = 4
"""Linux: the pages go, and come back from their file when they are touched again."""
M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1
"""glibc's `mallopt`: the number of heaps that threads may have together, the size from which blocks
have separate pages, which go back to the system when they are freed, and the free bytes at a heap's
end from which these go back, too."""
LARGE_BLOCK_BYTES = 256 << 10
"""Bodies, texts and their tokens; activations of one token are smaller."""
MOST_BLOCK_BYTES = 32 << 20
"""The most that glibc takes as M_MMAP_THRESHOLD."""
LIBRARY_CODE = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) .[^w]\S* .*\.so(?:\.[^/\n]*)?\n(?:[A-Z].*\n)*?Anonymous: +0 kB",
    re.MULTILINE,
)
"""A mapping in `/proc/PID/smaps`."""
_has_loaded = threading.Event()
"""Whether this process has loaded a model."""


def release_unused() -> None:
    """Forgets source texts, returns free heap, unmaps pages of libraries' code not in use.

    Importing PyTorch and Transformers touches some 85 MiB of code and constants, of which serving
    touches 35 again. The kernel would keep all of it resident, and count it as ours, until memory
    runs short. Elsewhere than on Linux only the source texts go, which decorators of Transformers
    have read.
    """
    linecache.clearcache()
    if not sys.platform.startswith("linux"):
        return
    return_free_heap()
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in find_library_code(Path("/proc/self/smaps")):
        # Advice only: where it is not taken the pages stay, and nothing else is wrong.
        libc.madvise(start, end - start, MADV_DONTNEED)


def share_one_heap() -> None:
    """Make all new threads allocate from one heap (glibc; elsewhere nothing).

    Call it before libraries start threads. Otherwise each thread may get a heap that keeps its
    peak, and `return_free_heap` trims only the first. One thread computes and the others wait for
    files or clients, so there is little contention for the heap's lock.
    """
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(M_ARENA_MAX, 1)
        # A fixed threshold: glibc's own rises to 32 MiB with the first large block that is freed.
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def keep_decoded(num_bytes: int) -> None:
    """Let memory freed after decoding an expert serve the next one (glibc; elsewhere nothing).

    Its pages would go back to the system otherwise, and new ones take as long as the decoding.

    Args:
        num_bytes: for one expert; 0: experts are used as they are stored.
    """
    if num_bytes and (mallopt := _glibc("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, MOST_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, num_bytes + MOST_BLOCK_BYTES)


def return_free_heap() -> None:
    """Return free pages of the heap to the operating system (glibc; elsewhere nothing).

    Tensors of many sizes fragment the heap, which would otherwise keep its peak.
    """
    if (malloc_trim := _glibc("malloc_trim")) is not None:
        malloc_trim(0)


@functools.cache
def _glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's own; None where there is another C library."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)


def freeze_objects() -> None:
    """Exclude all current objects from garbage collection, in a process that keeps them.

    PyTorch, Transformers and a model are half a million objects. Scanning them takes 0.2 s, during
    which no request proceeds; and because of their number Python scans rarely, so that cycles of
    short-lived objects stay for long.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def freeze_while_loaded() -> None:
    """The same until `unfreeze_objects`, without the time for a collection before.

    Cycles that are garbage already stay until then.
    """
    gc.collect(1)
    gc.freeze()
    _has_loaded.set()


def unfreeze_objects() -> None:
    """Let garbage collection see all objects again."""
    gc.unfreeze()


def release_earlier_models() -> None:
    """Free the memory of models that were loaded before and that nobody refers to any more.

    A model refers to itself, so that only a collection frees it, and never while it is frozen: a
    process that loads one after another would keep them all.
    """
    if _has_loaded.is_set():
        gc.unfreeze()
        gc.collect()


def find_library_code(smaps: Path) -> Iterator[tuple[int, int]]:
    """Address ranges of shared libraries that hold the file's own bytes and nothing else.

    A range with private pages (relocated pointers, data) is never among them: there the file's
    bytes would come back, and not what was written.
    """
    try:
        text = smaps.read_text()
    except OSError:
        # A container may hide it; what it is for is only to save memory.
        return
    for start, end in LIBRARY_CODE.findall(text):
        yield int(start, 16), int(end, 16)


CGROUPS = Path("/sys/fs/cgroup")
"""The limits that containers and services run under (Linux)."""
OWN_CGROUPS = Path("/proc/self/cgroup")
"""The groups of this process."""


def available_memory_bytes(groups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the memory that can be allocated without swapping, within all limits of the process.

    The pages of files that a container has read count as used there, but they can be dropped.
    """
    rooms = [int(psutil.virtual_memory().available)]
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]  # ulimit -v
    if addresses != resource.RLIM_INFINITY:
        rooms.append(addresses - psutil.Process().memory_info().vms)
    for folder, limit_file, used_file in _list_memory_groups(groups, own):
        limit, used = folder / limit_file, folder / used_file
        if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
            held = int(used.read_text()) - _read_inactive_file_bytes(folder / "memory.stat")
            rooms.append(int(limit.read_text()) - held)
    return max(0, min(rooms))


def _list_memory_groups(groups: Path, own: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields this process's memory groups and all above them, with their files of limit and use.

    A container sees its own group at the top, whatever its path outside is.
    """
    lines = own.read_text().splitlines() if own.is_file() else []
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    first = next((path for names, path in paths.items() if "memory" in names.split(",")), "/")
    versions = (
        (groups, paths.get("", "/"), "memory.max", "memory.current"),
        (groups / "memory", first, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for top, path, limit_file, used_file in versions:
        folder = top / path.strip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(top):
                yield place, limit_file, used_file


def _read_inactive_file_bytes(stat: Path) -> int:
    lines = stat.read_text().splitlines() if stat.is_file() else []
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def peak_memory_bytes() -> int:
    """The process's largest resident set so far.

    Linux keeps `ru_maxrss` across exec, so a child would start with its parent's.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
