"""Limits the memory of a process from outside, the page cache of its weights included.

The pages of mapped weights are in the page cache, which no process is charged for while memory is
free. A comparison at equal memory has to charge them. A cgroup with a writable `memory.max` does
so; most containers have none. This module does it with two system calls: `cachestat` returns how
much of a file is in the page cache, and `process_madvise(MADV_PAGEOUT)` with
`posix_fadvise(DONTNEED)` drop parts of it.

A process is charged for its anonymous memory and for all cached pages of its weights' files; code
of libraries is not charged. Blocks of `BLOCK` bytes are dropped at random: random replacement keeps
more of what is read cyclically (layer after layer) than the kernel's LRU would, and less of what is
used often. A process whose anonymous memory alone exceeds the limit is killed, as by the kernel.

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
"""A disk of 2 GB/s reads 10 MiB in this time, by which the limit may be exceeded for a moment."""
SLACK = 1 / 64
"""Share of the files' bytes above the limit at which blocks are dropped: counting pages, whose time
is in proportion to the files, more often takes more of a core than the kernel's own bookkeeping
would."""
COUNT_SECONDS = 0.5
"""Longest time between two counts of the cached pages."""
PRIORITY = -15
SYS_PROCESS_MADVISE, SYS_CACHESTAT = 440, 451
MADV_PAGEOUT = 21
GONE = (errno.ESRCH, errno.ENOMEM, errno.EINVAL, errno.EBADF)
"""The process or the mapping ended during the call: there is nothing left to drop."""

libc = ctypes.CDLL(None, use_errno=True)


class CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class CachestatCounts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass
class ChargedMemory:
    """The peak of each kind of memory, in bytes."""

    anonymous: int = 0
    cached: int = 0
    """Pages of the weights' files in the page cache."""
    total: int = 0


class CachedFile:
    """A file whose pages in the page cache are counted and dropped."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        status = os.fstat(self.fd)
        self.num_bytes, self.inode = status.st_size, status.st_ino

    def cached_bytes(self, offset: int = 0, length: int = 0) -> int:
        """Returns the cached bytes of a part; length 0 means to the end.

        Raises:
            OSError: the kernel has no `cachestat`.
        """
        answer, part = CachestatCounts(), CachestatRange(offset, length)
        arguments = (self.fd, ctypes.byref(part), ctypes.byref(answer), 0)
        if libc.syscall(SYS_CACHESTAT, *arguments) != 0:
            raise OSError(ctypes.get_errno(), "cachestat (Linux 6.5 or later)")
        return answer.cached * PAGE

    def drop(self, offset: int = 0, length: int = 0) -> None:
        """Drops the cached pages that no process maps; length 0 means to the end."""
        os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class FileMapping:
    """A part of a file in a process's memory."""

    inode: int
    start: int
    end: int
    offset: int

    def part(self, offset: int, length: int) -> IoVector | None:
        """Returns the addresses of a part of the file; None if the mapping has none of it."""
        first = max(self.start, self.start + offset - self.offset)
        last = min(self.end, self.start + offset + length - self.offset)
        return IoVector(first, last - first) if first < last else None


def file_mappings(pid: int, inodes: set[int]) -> list[FileMapping]:
    """Returns a process's mappings of some files; none after it has ended."""
    result = []
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        span, _, offset, _, inode, *_ = line.split(maxsplit=5)
        if int(inode) in inodes:
            start, end = (int(part, 16) for part in span.split("-"))
            result.append(FileMapping(int(inode), start, end, int(offset, 16)))
    return result


def anonymous_bytes(pid: int) -> int:
    """Returns the resident memory that belongs to no file; 0 after the process has ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE


def read_bytes(pid: int) -> int:
    """Returns the bytes that a process has read from the disk; 0 after it has ended."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


def page_out(pidfd: int, parts: Iterable[IoVector]) -> None:
    """Drops ranges of a process's memory; clean pages of files leave the page cache too."""
    vectors = list(parts)
    if not vectors:
        return
    array = (IoVector * len(vectors))(*vectors)
    done = libc.syscall(SYS_PROCESS_MADVISE, pidfd, array, len(vectors), MADV_PAGEOUT, 0)
    if done < 0 and (number := ctypes.get_errno()) not in GONE:
        raise OSError(number, "process_madvise (needs root)")


def random_blocks(files: list[CachedFile], seed: int) -> Iterator[tuple[CachedFile, int]]:
    """Yields all blocks of all files in random order, endlessly."""
    blocks = [(file, offset) for file in files for offset in range(0, file.num_bytes, BLOCK)]
    order = random.Random(seed)
    while blocks:
        order.shuffle(blocks)
        yield from blocks


class MemoryLimiter:
    """Limits the memory of one process until it ends."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        files: Iterable[Path],
        limit_bytes: int,
        reserved_bytes: int = 0,
    ) -> None:
        """Prepares to limit a process.

        Args:
            reserved_bytes: The part of the limit that is for anonymous memory alone: what the
                process does not need of it is not used for cached pages.
        """
        self.process = process
        self.files = [CachedFile(path) for path in files]
        self.limit_bytes, self.reserved_bytes = limit_bytes, reserved_bytes
        self.slack_bytes = int(SLACK * sum(file.num_bytes for file in self.files))
        self.peak = ChargedMemory()
        self.dropped_bytes = 0
        self.busy_seconds = 0.0
        """CPU time that the limiter took from the machine."""
        self.was_killed = False
        self._inodes = {file.inode for file in self.files}
        self._order = random_blocks(self.files, seed=0)
        self._charges: list[int] = []
        # Cached and read bytes at the last count, and its time.
        self._cached = self._read = 0
        self._counted = 0.0

    def watch(self, timeout_seconds: float) -> None:
        """Enforces the limit until the process has ended.

        Raises:
            TimeoutError: it ran for longer, and was killed.
        """
        deadline = time.monotonic() + timeout_seconds
        started = time.thread_time()
        pidfd = os.pidfd_open(self.process.pid)
        me = threading.get_native_id()
        # The limiter has to keep up with a peer that keeps all cores busy.
        os.setpriority(os.PRIO_PROCESS, me, PRIORITY)
        try:
            while self.process.poll() is None:
                if time.monotonic() > deadline:
                    self.process.kill()
                    raise TimeoutError(f"no end after {timeout_seconds:.0f} s")
                self.enforce(pidfd)
                time.sleep(PERIOD_SECONDS)
        finally:
            os.setpriority(os.PRIO_PROCESS, me, 0)
            self.busy_seconds = time.thread_time() - started
            os.close(pidfd)
            for file in self.files:
                file.close()

    def mean_charged_bytes(self) -> float:
        """Returns the mean charge before each drop, which is slightly too high."""
        return statistics.fmean(self._charges or [0])

    def enforce(self, pidfd: int) -> None:
        """Drops what exceeds the limit, once.

        Counting pages takes milliseconds, so they are counted when the bytes read from the disk
        since the last count could exceed the limit.
        """
        anonymous = anonymous_bytes(self.process.pid)
        self.peak.anonymous = max(self.peak.anonymous, anonymous)
        if anonymous > self.limit_bytes:
            self.was_killed = True
            self.process.kill()
            return
        read, now = read_bytes(self.process.pid), time.monotonic()
        own = max(anonymous, self.reserved_bytes)
        at_most = own + self._cached + (read - self._read)
        if at_most <= self.limit_bytes + self.slack_bytes and now < self._counted + COUNT_SECONDS:
            return
        self._cached = sum(file.cached_bytes() for file in self.files)
        self._read, self._counted = read, now
        self.peak.cached = max(self.peak.cached, self._cached)
        self.peak.total = max(self.peak.total, anonymous + self._cached)
        self._charges.append(anonymous + self._cached)
        if (excess := own + self._cached - self.limit_bytes) > 0:
            dropped = self.drop(pidfd, excess)
            self._cached -= dropped
            self.dropped_bytes += dropped

    def drop(self, pidfd: int, excess: int) -> int:
        """Drops at least `excess` bytes if possible; returns the bytes dropped."""
        mapped: dict[int, list[FileMapping]] = {}
        for mapping in file_mappings(self.process.pid, self._inodes):
            mapped.setdefault(mapping.inode, []).append(mapping)
        tries = sum(-(-file.num_bytes // BLOCK) for file in self.files)
        dropped = 0
        while dropped < excess and tries > 0:
            file, offset = next(self._order)
            tries -= 1
            if (before := file.cached_bytes(offset, BLOCK)) == 0:
                continue
            parts = (mapping.part(offset, BLOCK) for mapping in mapped.get(file.inode, ()))
            page_out(pidfd, (part for part in parts if part is not None))
            file.drop(offset, BLOCK)
            dropped += before - file.cached_bytes(offset, BLOCK)
        return dropped
