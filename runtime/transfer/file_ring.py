"""The ring of a store, which fills slots of an arena."""

import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from struct import Struct

from runtime.policy.eviction.base import Expert
from runtime.policy.tier import TransferTask
from runtime.store.base import ExpertStore
from runtime.store.files import Altered, OpenFile
from runtime.transfer.arena import Arena
from runtime.transfer.ring import ARRIVED, Arrivals, Ring
from runtime.transfer.thread_ring import ThreadRing, rings

STORE_THREADS = 2
"""Readers of a store: two saturate a disk."""
PART = Struct("=iiqqQQ")
"""A part of a transfer in `rings.c`: number of its file, flags, offset in the file, size, address
and checksum."""
CHECKED, DROPPED = 1, 2
"""Flags: the checksum is compared; pages leave the page cache after a read through it."""


ExpertParts = tuple[tuple[Path, ...], bytes]
"""The files of an expert, none where the store has to convert what it reads, and its bytes as
`rings.c` reads them: `PART` of each of the slot's ranges; addresses count from its beginning."""


class StoreRing(Ring):
    """Reads chunks of experts from a store.

    Where slots hold bytes as the files do, compiled threads read them. What fails there, for
    whatever reason, is given to a thread of Python that calls the store's own `read`, with its
    attempts and messages; so is everything that is converted on arrival. So a transfer ends as
    `ARRIVED`, or with an error of the store in `errors`.

    Args:
        arena: In host memory. It is kept as long as a read may write to it.
        cpus: The processors that threads run on; None: any.
        closes: The store is closed with the ring; off where others read from it too.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        store: ExpertStore,
        arena: Arena,
        *,
        num_threads: int = STORE_THREADS,
        cpus: frozenset[int] | None = None,
        closes: bool = True,
    ):
        self._store = store
        self._arena = arena
        self._closes = closes
        self._threads = ThreadRing(arrivals, self.transfer, num_threads, name="disk", cpus=cpus)
        self.errors = self._threads.errors
        self._compiled = None
        if rings is not None and isinstance(arrivals, rings.Arrivals):
            self._compiled = rings.FileRing(arrivals, num_threads, cpus, arena)
        self._reads: dict[int, tuple[TransferTask, Sequence[OpenFile]]] = {}
        """Those in `rings.c` that are not settled, by ticket, and their files, open until then."""
        self._lost: set[int] = set()
        """Tickets of reads that hang; nobody waits for them."""
        self._parts: dict[Expert, ExpertParts] = {}
        self._bounds = [
            list(accumulate(map(len, layout.chunk_ranges), initial=0)) for layout in store.layouts
        ]
        """Index of each chunk's first range, of each layer."""

    def transfer(self, task: TransferTask) -> None:
        layer, expert = task.expert
        chunks = range(task.first_chunk, task.end_chunk)
        self._store.read(layer, expert, chunks, self._arena.slot(task.slot))

    def submit(self, ticket: int, task: TransferTask) -> None:
        if self._compiled is None or (files := self._open(task.expert)) is None:
            self._threads.submit(ticket, task)
            return
        bounds = self._bounds[task.expert[0]]
        first, end = bounds[task.first_chunk], bounds[task.end_chunk]
        _, parts = self._parts[task.expert]
        parts = parts[first * PART.size : end * PART.size]
        descriptors = b"".join([opened.packed for opened in files])
        address = self._arena.slot(task.slot).data_ptr()
        try:
            self._compiled.submit(ticket, task.high, parts, descriptors, address)
        except (OSError, RuntimeError):  # no thread, or closed
            self._store.files.unpin(files, failed=True)
            raise
        self._reads[ticket] = task, files

    def _open(self, expert: Expert) -> Sequence[OpenFile] | None:
        """Returns the open files of the expert; None: only the store can read it."""
        known = self._parts.get(expert)
        if known is None:
            known = self._parts[expert] = self._find_parts(expert)
        files, _ = known
        if not files:
            return None
        try:
            return self._store.files.pin(files)
        except (OSError, Altered):
            return None  # the store says what is wrong

    def _find_parts(self, expert: Expert) -> ExpertParts:
        extents = self._store.extents(*expert)
        if extents is None:
            return (), b""
        files = tuple(dict.fromkeys(extent.file for extent in extents))
        chunks = self._store.layouts[expert[0]].chunk_ranges
        ranges = [bounds for chunk in chunks for bounds in chunk]
        parts = b""
        for (start, end), extent in zip(ranges, extents, strict=True):
            flags = CHECKED * (extent.checksum is not None)
            flags |= DROPPED * self._store.files.drops_pages
            number = files.index(extent.file)
            checksum = extent.checksum or 0
            parts += PART.pack(number, flags, extent.offset, end - start, start, checksum)
        return files, parts

    def cancel(self, ticket: int) -> bool:
        if ticket not in self._reads or self._compiled is None:
            return self._threads.cancel(ticket)
        if not self._compiled.cancel(ticket):
            return False
        _, files = self._reads.pop(ticket)
        self._store.files.unpin(files)
        return True

    def settle(self, ticket: int, status: int) -> bool:
        if ticket not in self._reads:
            return True
        task, files = self._reads.pop(ticket)
        self._store.files.unpin(files, failed=status != ARRIVED)
        if status == ARRIVED or ticket in self._lost:
            self._lost.discard(ticket)
            return True
        self._threads.submit(ticket, task)
        return False

    def running(self) -> list[tuple[int, float]]:
        compiled = [] if self._compiled is None else self._compiled.running()
        return compiled + self._threads.running()

    def replace_thread(self, ticket: int) -> None:
        if ticket not in self._reads or self._compiled is None:
            self._threads.replace_thread(ticket)
            return
        self._lost.add(ticket)
        self._compiled.replace_thread(ticket)

    def close(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        has_ended = self._compiled is None or self._compiled.close(seconds)
        has_ended &= self._threads.close(max(0.0, end - time.monotonic()))
        if has_ended:
            for _, files in self._reads.values():
                self._store.files.unpin(files)
            self._reads.clear()
            if self._closes:
                self._store.close()
        return has_ended
