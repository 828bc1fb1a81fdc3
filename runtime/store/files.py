"""Reads byte ranges of files completely, or raises an error with the place and a remedy.

Reads must not fill the page cache: experts would be in memory twice, outside the budget. So they
are direct where the file system supports it, and their pages are dropped otherwise. `moecast
doctor` compares both ways on the model's own disk.
"""

import ctypes
import errno
import hashlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Self, TypeVar

from runtime.config import PageCache
from runtime.errors import Fault, TransferError

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK = 4096
"""Bytes. Disks and file systems ask for 512 or 4096 (the size of a page); 4096 does for both."""

ALIGNMENT = 64
"""Bytes. Kernels take other paths on unaligned weights, and then the last bits differ."""

SMALLEST = 64 << 10
"""Below this many bytes, the blocks at the edges would cost more than the page cache does."""

O_DIRECT = getattr(os, "O_DIRECT", 0)
"""0 where the system has none (macOS)."""

_edges = threading.local()


def align(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


class EndOfFile(Exception):
    """The file ends before the range does."""


class Altered(Exception):
    """The file is not the one that was remembered."""

    def __init__(self, message: str, *, fault: Fault = Fault.READ):
        super().__init__(message)
        self.fault = fault


class FileRange(NamedTuple):
    """The place of bytes that fill a part of a slot as they are."""

    file: Path
    offset: int
    checksum: int | None = None
    """XXH3 of the bytes, 64 bits; None: unknown."""


def address(target: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(target))


def _edge_blocks() -> memoryview:
    """Three blocks of this thread's own; a map is aligned to pages."""
    if not hasattr(_edges, "blocks"):
        _edges.blocks = memoryview(mmap.mmap(-1, 3 * BLOCK))
    return _edges.blocks


def read_parts(descriptor: int, offset: int, parts: list[memoryview], needed: int) -> None:
    """Reads from `offset` into the parts, one after another, at least `needed` bytes.

    The last block of a file may be a part of one, hence `needed`. A network file system may return
    less than requested: where the next direct read cannot start there, the system says EINVAL.

    Raises:
        EndOfFile: the file is shorter.
        OSError: the disk fails.
    """
    done = 0
    while done < needed:
        count = os.preadv(descriptor, parts, offset + done)
        if count == 0:
            raise EndOfFile(f"after {done} bytes")
        done += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts and count:
            parts[0] = parts[0][count:]


def read_direct(descriptor: int, offset: int, target: memoryview) -> None:
    """Fills `target`, at least `SMALLEST` bytes, from `offset` of a file opened with O_DIRECT.

    The system reads whole blocks into memory that is aligned as they are. So the blocks that lie
    wholly inside the range are read straight into the target, from its first aligned address on,
    and then moved by less than a block to where they belong; the blocks at its edges go through a
    small buffer. All of it is one call. Where range and target are aligned (a packed store),
    nothing is moved.

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
        read_parts(descriptor, offset, [target], size)
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
    read_parts(descriptor, start, [head, middle, tail], before + size)
    in_head = BLOCK - before
    ctypes.memmove(place + in_head, place + aligned, inside)
    target[:in_head] = head[before:]
    target[in_head + inside :] = tail[: size - in_head - inside]


ATTEMPTS = 3
"""A disk that fails a read often succeeds at the next; one that does not is broken."""
PAUSE_SECONDS = 0.01
"""Between attempts."""


DESCRIPTORS = Struct("=ii")
"""The form in which compiled code takes them (`runtime.transfer`): buffered, then direct or -1."""


@dataclass(eq=False)
class OpenFile:
    """Descriptors of one file: through the page cache, and past it where possible."""

    file: Path
    buffered: int
    direct: int | None
    num_readers: int = 0

    def __post_init__(self) -> None:
        self.packed = DESCRIPTORS.pack(self.buffered, -1 if self.direct is None else self.direct)

    def close(self) -> None:
        for descriptor in (self.buffered, self.direct):
            if descriptor is not None:
                # On a disk that is gone it fails, and frees the descriptor all the same.
                with suppress(OSError):
                    os.close(descriptor)


NUM_SAMPLES, SAMPLE_BYTES = 16, 4096
"""Samples of each remembered file: on a hard disk they take a tenth of a second."""
SECONDS_BETWEEN_LOOKS = 1.0
"""Between looks at whether a remembered file was written to."""


@dataclass(frozen=True)
class Content:
    """The state of a file when its offsets were read."""

    stamp: tuple[int, ...]
    """Device, inode, size and time of the last change: alike, nobody wrote to it."""
    samples: str
    """Digest over bytes that are evenly spaced, which tells two checkpoints apart."""

    @classmethod
    def of(cls, descriptor: int) -> Self:
        content = cls(stamp_of(descriptor), "")
        digest = hashlib.sha256()
        for i in range(NUM_SAMPLES):
            offset = max(0, content.size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1)
            digest.update(os.pread(descriptor, SAMPLE_BYTES, offset))
        return replace(content, samples=digest.hexdigest())

    @property
    def size(self) -> int:
        return self.stamp[2]


def stamp_of(descriptor: int) -> tuple[int, ...]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def has_stamp(descriptor: int, stamp: tuple[int, ...]) -> bool:
    try:
        return stamp_of(descriptor) == stamp
    except OSError:
        return False  # of a disk that was unmounted


class FileReader:
    """Open files by path. Thread-safe."""

    def __init__(self, *, page_cache: PageCache = PageCache.BYPASS):
        self._page_cache = page_cache
        self._files: dict[Path, OpenFile] = {}
        self._contents: dict[Path, Content] = {}
        self._looked = 0.0
        self._lock = threading.Lock()
        self._told = False

    @property
    def drops_pages(self) -> bool:
        """Whether reads through the page cache leave nothing there."""
        return self._page_cache is not PageCache.KEEP

    def remember(self, files: Iterable[Path]) -> None:
        """Opens files whose offsets are known, and refuses from now on others under their names.

        Open files stay readable when others are moved over them. One that is opened again, or was
        written to, must have the content that it had.

        Raises:
            TransferError: the last of three attempts to open or read a file failed.
        """
        for file in set(files).difference(self._contents):
            what = f"{NUM_SAMPLES * SAMPLE_BYTES} bytes of samples"
            content = self._use(file, what, lambda opened: Content.of(opened.buffered))
            with self._lock:
                self._contents[file] = content

    def _look(self) -> None:
        """Opens files again that were written to, about once a second."""
        if not self._contents or time.monotonic() < self._looked + SECONDS_BETWEEN_LOOKS:
            return
        self._looked = time.monotonic()
        for file, content in self._contents.items():
            opened = self._files.get(file)
            if opened is not None and not has_stamp(opened.buffered, content.stamp):
                del self._files[file]
                if not opened.num_readers:
                    opened.close()

    def _require_content(self, opened: OpenFile) -> None:
        file, content = opened.file, self._contents.get(opened.file)
        if content is None or has_stamp(opened.buffered, content.stamp):
            return
        found = Content.of(opened.buffered)
        if found.size < content.size:
            raise Altered(
                f"ends at byte {found.size}, no longer {content.size}; it was truncated: fetch it "
                "again",
                fault=Fault.TRUNCATED,
            )
        if found.samples != content.samples:
            raise Altered(
                "another file than when the model was loaded; load the model again, or fetch the "
                "file that it was"
            )
        self._contents[file] = found

    def pin(self, files: Sequence[Path]) -> list[OpenFile]:
        """Opens the files where they are not open; their descriptors stay until `unpin`.

        Raises:
            OSError: a file cannot be opened.
            Altered: a file is not the one that `remember` saw.
        """
        pinned: list[OpenFile] = []
        with self._lock:
            try:
                self._look()
                for file in files:
                    if file not in self._files:
                        self._files[file] = self._opened(file)
                    pinned.append(self._files[file])
                    self._files[file].num_readers += 1
            except (OSError, Altered):
                self._release(pinned)
                raise
        return pinned

    def unpin(self, pinned: Sequence[OpenFile], *, failed: bool = False) -> None:
        """Ends a use of the files.

        Args:
            failed: the next read opens them again: a disk that was unmounted, or a file that was
                fetched again, is thus not read through an old descriptor.
        """
        with self._lock:
            for opened in pinned if failed else ():
                if self._files.get(opened.file) is opened:
                    del self._files[opened.file]
            self._release(pinned)

    def _release(self, pinned: Sequence[OpenFile]) -> None:
        for opened in pinned:
            opened.num_readers -= 1
            if not opened.num_readers and self._files.get(opened.file) is not opened:
                opened.close()

    def _opened(self, file: Path) -> OpenFile:
        buffered = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        if self.drops_pages and hasattr(os, "posix_fadvise"):
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
        opened = OpenFile(file, buffered, direct)
        try:
            self._require_content(opened)
        except (OSError, Altered):
            opened.close()
            raise
        return opened

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
            TransferError: the file ends too soon, is not the one that `remember` saw, or the last
                of three attempts failed.
        """

        def fill(opened: OpenFile) -> None:
            try:
                self._read_once(opened, offset, target)
            except EndOfFile as end:
                self._require_content(opened)
                raise TransferError(
                    f"{file}: ends at byte {os.fstat(opened.buffered).st_size}, where {what} "
                    f"needs {offset} to {offset + len(target)}; it was truncated: fetch it "
                    "again",
                    fault=Fault.TRUNCATED,
                ) from end

        self._use(file, f"{len(target)} bytes of {what} at {offset}", fill)

    def _use(self, file: Path, what: str, use: Callable[[OpenFile], T]) -> T:
        """Calls `use` with the open file; opens it again after an error, three times in all."""
        for attempt in range(ATTEMPTS):
            try:
                [opened] = self.pin([file])
                failed = True
                try:
                    result = use(opened)
                    failed = False
                    return result
                finally:
                    self.unpin([opened], failed=failed)
            except Altered as error:
                raise TransferError(
                    f"{file}: {error} (reading {what})", fault=error.fault
                ) from error
            except OSError as error:
                if attempt + 1 == ATTEMPTS:
                    raise TransferError(
                        f"{file}: reading {what} failed {ATTEMPTS} times: {error}; check the disk, "
                        "or fetch the file again"
                    ) from error
                time.sleep(PAUSE_SECONDS)
        raise AssertionError("the last attempt raises")

    def _read_once(self, opened: OpenFile, offset: int, target: memoryview) -> None:
        if opened.direct is not None and len(target) >= SMALLEST:
            try:
                read_direct(opened.direct, offset, target)
                return
            except OSError as error:
                # Some file systems open for direct reads and refuse the reads themselves.
                if error.errno != errno.EINVAL:
                    raise
                self._tell(opened.file)
        read_parts(opened.buffered, offset, [target], len(target))
        if self.drops_pages and hasattr(os, "posix_fadvise"):
            # Whole pages: those at the edges are read again by their neighbours, seldom.
            start = offset // BLOCK * BLOCK
            end = align(offset + len(target), BLOCK)
            os.posix_fadvise(opened.buffered, start, end - start, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; one that a read is still stuck in closes when the read ends."""
        with self._lock:
            for opened in self._files.values():
                if not opened.num_readers:
                    opened.close()
            self._files.clear()


def write_whole(descriptor: int, view: memoryview, position: int) -> None:
    """Writes all bytes of `view` from `position` on.

    Raises:
        OSError: The disk is full or broken.
    """
    while view:
        done = os.pwrite(descriptor, view, position)
        view, position = view[done:], position + done
