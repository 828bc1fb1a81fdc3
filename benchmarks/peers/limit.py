"""Holds a process to a memory limit, the page cache of its weights included, from outside.

A peer that maps its weights into memory keeps them in the page cache, which is nobody's memory as
long as there is enough. To compare at equal memory, that has to count. Where the kernel does it
(a cgroup with `memory.max` that one may write), use that; most containers offer none. This does the
same with two system calls: `cachestat` tells how much of a file is in the page cache, and
`process_madvise(MADV_PAGEOUT)` with `posix_fadvise(DONTNEED)` drop parts of it.

Charged are the process's anonymous memory and all of its weights' files that is in the page cache,
whoever read it. Code of libraries is not charged, to nobody. What is dropped is chosen by chance in
blocks of `BLOCK` bytes: random replacement, which keeps more of what is read in circles (layer
after layer) than the kernel's LRU would and less of what is used often. A process whose anonymous
memory alone is above the limit is killed, as the kernel would.

Needs Linux 6.5 or later and, for `process_madvise`, root.
"""

import ctypes
import errno
import os
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCK = 2**20
"""Bytes: one weight matrix of an expert inflated to 3 MiB."""
PERIOD_SECONDS = 0.005
"""A disk of 2 GB/s brings 10 MiB in this time, by which the limit may be passed for a moment."""
SLACK = 32 * 2**20
"""Bytes above the limit at which something is dropped: counting pages for less takes more of a core
than the kernel's own bookkeeping would. What is watched has this much more than its limit."""
COUNT_SECONDS = 0.5
"""After this long pages are counted anyway."""
PRIORITY = -15
SYS_PROCESS_MADVISE, SYS_CACHESTAT = 440, 451
MADV_PAGEOUT = 21
GONE = (errno.ESRCH, errno.ENOMEM, errno.EINVAL, errno.EBADF)
"""The process, or the mapping, went while we were asking: nothing is left to drop there."""

libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass
class Charge:
    """Bytes of memory: now, or at their most."""

    anonymous: int = 0
    cached: int = 0
    """Of the weights' files, in the page cache."""
    together: int = 0


class File:
    """One file whose share of the page cache is counted and dropped."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        status = os.fstat(self.fd)
        self.num_bytes, self.inode = status.st_size, status.st_ino

    def cached_bytes(self, offset: int = 0, length: int = 0) -> int:
        """Of this part in the page cache; length 0: to the end.

        Raises:
            OSError: the kernel has no `cachestat`.
        """
        answer, part = _CacheStat(), _Range(offset, length)
        arguments = (self.fd, ctypes.byref(part), ctypes.byref(answer), 0)
        if libc.syscall(SYS_CACHESTAT, *arguments) != 0:
            raise OSError(ctypes.get_errno(), "cachestat (Linux 6.5 or later)")
        return answer.cached * PAGE

    def drop(self, offset: int = 0, length: int = 0) -> None:
        """Pages that no process maps leave the page cache; length 0: to the end."""
        os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class Mapping:
    """A part of a file in a process's memory."""

    inode: int
    start: int
    end: int
    offset: int

    def part(self, offset: int, length: int) -> _Vector | None:
        """Where this much of the file lies, if the mapping holds any of it."""
        first = max(self.start, self.start + offset - self.offset)
        last = min(self.end, self.start + offset + length - self.offset)
        return _Vector(first, last - first) if first < last else None


def mappings(pid: int, inodes: set[int]) -> list[Mapping]:
    """What a process maps of some files; nothing once it has ended."""
    found = []
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        span, _, offset, _, inode, *_ = line.split(maxsplit=5)
        if int(inode) in inodes:
            start, end = (int(part, 16) for part in span.split("-"))
            found.append(Mapping(int(inode), start, end, int(offset, 16)))
    return found


def anonymous_bytes(pid: int) -> int:
    """Resident memory that belongs to no file; 0 once the process has ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE


def read_bytes(pid: int) -> int:
    """What a process has had the disk read; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


def page_out(pidfd: int, parts: Iterable[_Vector]) -> None:
    """Takes these ranges out of a process's memory; clean pages of files leave the page cache."""
    vectors = list(parts)
    if not vectors:
        return
    array = (_Vector * len(vectors))(*vectors)
    done = libc.syscall(SYS_PROCESS_MADVISE, pidfd, array, len(vectors), MADV_PAGEOUT, 0)
    if done < 0 and (number := ctypes.get_errno()) not in GONE:
        raise OSError(number, "process_madvise (needs root)")


def blocks(files: list[File], seed: int) -> Iterator[tuple[File, int]]:
    """All blocks of all files in random order, again and again in other orders."""
    every = [(file, offset) for file in files for offset in range(0, file.num_bytes, BLOCK)]
    order = random.Random(seed)
    while every:
        order.shuffle(every)
        yield from every


class Limiter:
    """Watches one process until it ends."""

    def __init__(
        self, process: subprocess.Popen[bytes], files: Iterable[Path], limit_bytes: int
    ) -> None:
        self.process = process
        self.files = [File(path) for path in files]
        self.limit_bytes = limit_bytes
        self.peak = Charge()
        self.dropped_bytes = 0
        self.busy_seconds = 0.0
        """CPU time that watching took from the machine."""
        self.was_killed = False
        self._inodes = {file.inode for file in self.files}
        self._order = blocks(self.files, seed=0)
        self._charges: list[int] = []
        self._cached = self._read = 0
        self._counted = 0.0
        """What was in the page cache, and had been read, when it was last counted."""

    def watch(self, timeout_seconds: float) -> None:
        """Returns when the process has ended.

        Raises:
            TimeoutError: it went on for longer, and was killed.
        """
        deadline = time.monotonic() + timeout_seconds
        started = time.thread_time()
        pidfd = os.pidfd_open(self.process.pid)
        me = threading.get_native_id()
        # Where the peer keeps all cores busy, it must not run away from its limit.
        os.setpriority(os.PRIO_PROCESS, me, PRIORITY)
        try:
            while self.process.poll() is None:
                if time.monotonic() > deadline:
                    self.process.kill()
                    raise TimeoutError(f"not done after {timeout_seconds:.0f} s")
                self.enforce(pidfd)
                time.sleep(PERIOD_SECONDS)
        finally:
            os.setpriority(os.PRIO_PROCESS, me, 0)
            self.busy_seconds = time.thread_time() - started
            os.close(pidfd)
            for file in self.files:
                file.close()

    def mean_charged_bytes(self) -> float:
        """What was charged when pages were counted, before any were dropped: a little too much."""
        return statistics.fmean(self._charges or [0])

    def enforce(self, pidfd: int) -> None:
        """Looks once, and drops what is above the limit.

        Counting pages takes milliseconds, so it waits until as much has been read from the disk as
        could have brought the page cache above the limit.
        """
        anonymous = anonymous_bytes(self.process.pid)
        self.peak.anonymous = max(self.peak.anonymous, anonymous)
        if anonymous > self.limit_bytes:
            self.was_killed = True
            self.process.kill()
            return
        read, now = read_bytes(self.process.pid), time.monotonic()
        at_most = anonymous + self._cached + (read - self._read)
        if at_most <= self.limit_bytes + SLACK and now < self._counted + COUNT_SECONDS:
            return
        self._cached = sum(file.cached_bytes() for file in self.files)
        self._read, self._counted = read, now
        self.peak.cached = max(self.peak.cached, self._cached)
        self.peak.together = max(self.peak.together, anonymous + self._cached)
        self._charges.append(anonymous + self._cached)
        if (excess := anonymous + self._cached - self.limit_bytes) > 0:
            dropped = self.drop(pidfd, excess)
            self._cached -= dropped
            self.dropped_bytes += dropped

    def drop(self, pidfd: int, excess: int) -> int:
        """That many bytes or a little more leave the page cache, or every block was tried."""
        mapped: dict[int, list[Mapping]] = {}
        for one in mappings(self.process.pid, self._inodes):
            mapped.setdefault(one.inode, []).append(one)
        tries = sum(-(-file.num_bytes // BLOCK) for file in self.files)
        dropped = 0
        while dropped < excess and tries > 0:
            file, offset = next(self._order)
            tries -= 1
            if (before := file.cached_bytes(offset, BLOCK)) == 0:
                continue
            parts = (one.part(offset, BLOCK) for one in mapped.get(file.inode, ()))
            page_out(pidfd, (part for part in parts if part is not None))
            file.drop(offset, BLOCK)
            dropped += before - file.cached_bytes(offset, BLOCK)
        return dropped
