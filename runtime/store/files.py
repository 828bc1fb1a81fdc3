"""Reads byte ranges of files completely, or raises an error with the place and a remedy.

Reads must not fill the page cache: experts would be in memory twice, outside the budget. So they
are direct where the file system supports it, and their pages are dropped otherwise. Measured on
ext4 (benchmarks/results/reads.json) with 8 MiB experts at random, direct reads are faster than cold
reads through the cache and take a third of their CPU time.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.config import PageCache
from runtime.errors import Fault, TransferError
from runtime.store.direct import BLOCK, O_DIRECT, SMALLEST, EndOfFile, read_direct

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""A disk that fails a read often succeeds at the next; one that does not is broken."""
PAUSE_SECONDS = 0.01
"""Between attempts."""


@dataclass(eq=False)
class OpenFile:
    """Descriptors of one file: through the page cache, and past it where possible."""

    buffered: int
    direct: int | None
    num_readers: int = 0

    def close(self) -> None:
        for descriptor in (self.buffered, self.direct):
            if descriptor is not None:
                # On a disk that is gone it fails, and frees the descriptor all the same.
                with suppress(OSError):
                    os.close(descriptor)


class FileReader:
    """Open files by path. Thread-safe."""

    def __init__(self, *, page_cache: PageCache = PageCache.BYPASS):
        self._page_cache = page_cache
        self._files: dict[Path, OpenFile] = {}
        self._lock = threading.Lock()
        self._told = False

    @contextmanager
    def _using(self, file: Path) -> Iterator[OpenFile]:
        """Pin the open file; after a failure the next read opens it again.

        A disk that was unmounted, or a file that was fetched again, is thus not read through an
        old descriptor.
        """
        with self._lock:
            if file not in self._files:
                self._files[file] = self._opened(file)
            opened = self._files[file]
            opened.num_readers += 1
        try:
            yield opened
        except (OSError, TransferError):
            with self._lock:
                if self._files.get(file) is opened:
                    del self._files[file]
            raise
        finally:
            with self._lock:
                opened.num_readers -= 1
                if not opened.num_readers and self._files.get(file) is not opened:
                    opened.close()

    def _opened(self, file: Path) -> OpenFile:
        buffered = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if self._page_cache is not PageCache.KEEP and hasattr(os, "posix_fadvise"):
            # Without it the system reads ahead, beyond what is dropped behind.
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_RANDOM)
        direct = None
        if self._page_cache is PageCache.BYPASS:
            try:
                direct = os.open(file, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT) if O_DIRECT else None
            except OSError as error:
                if error.errno != errno.EINVAL:
                    os.close(buffered)
                    raise
            if direct is None:
                self._tell(file)
        return OpenFile(buffered, direct)

    def _tell(self, file: Path) -> None:
        if not self._told:
            self._told = True
            log.info(
                "%s: no direct reads on this file system; reads go through the page cache "
                "and are dropped behind",
                file,
            )

    def read(self, file: Path, offset: int, target: memoryview, *, what: str) -> None:
        """Fills `target` from `offset` of the file.

        Args:
            what: name of what is read, for the error.

        Raises:
            TransferError: the file ends too soon, or the last of three attempts failed.
        """
        for attempt in range(ATTEMPTS):
            try:
                with self._using(file) as opened:
                    self._read_once(opened, file, offset, target, what)
            except OSError as error:
                if attempt + 1 == ATTEMPTS:
                    raise TransferError(
                        f"{file}: reading {len(target)} bytes of {what} at {offset} failed "
                        f"{ATTEMPTS} times: {error}; check the disk, or fetch the file again"
                    ) from error
                time.sleep(PAUSE_SECONDS)
            else:
                return

    def _read_once(
        self, opened: OpenFile, file: Path, offset: int, target: memoryview, what: str
    ) -> None:
        try:
            self._read_range(opened, file, offset, target)
        except EndOfFile as end:
            raise TransferError(
                f"{file}: ends at byte {os.fstat(opened.buffered).st_size}, where {what} needs "
                f"{offset} to {offset + len(target)}; it was truncated: fetch it again",
                fault=Fault.TRUNCATED,
            ) from end

    def _read_range(self, opened: OpenFile, file: Path, offset: int, target: memoryview) -> None:
        if opened.direct is not None and len(target) >= SMALLEST:
            try:
                read_direct(opened.direct, offset, target)
                return
            except OSError as error:
                # Some file systems open for direct reads and refuse the reads themselves.
                if error.errno != errno.EINVAL:
                    raise
                self._tell(file)
        self._read_buffered(opened.buffered, offset, target)

    def _read_buffered(self, descriptor: int, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                raise EndOfFile
            done += count
        if self._page_cache is not PageCache.KEEP and hasattr(os, "posix_fadvise"):
            # Whole pages: those at the edges are read again by their neighbours, seldom.
            start = offset // BLOCK * BLOCK
            end = -(-(offset + done) // BLOCK) * BLOCK
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the files; one that a read is still stuck in closes when the read ends."""
        with self._lock:
            for opened in self._files.values():
                if not opened.num_readers:
                    opened.close()
            self._files.clear()
