"""Copies from an arena in host memory to the one above it."""

import time
from collections.abc import Collection

from torch import Tensor

from runtime.accelerator import Accelerator, Event
from runtime.errors import TransferError
from runtime.policy.tier import TransferTask
from runtime.transfer.arena import Arena
from runtime.transfer.ring import Arrivals, Ring


class ArenaCopies:
    """The bytes of copies from one arena to another."""

    def __init__(self, source: Arena, target: Arena):
        self._source = source
        self._target = target

    def parts(self, task: TransferTask) -> list[tuple[Tensor, Tensor]]:
        """`(target, source)` bytes of each part of the task's chunks, uint8."""
        assert task.source_slot is not None
        target, source = self._target.slot(task.slot), self._source.slot(task.source_slot)
        ranges = self._target.chunk_ranges(task.expert[0])[task.first_chunk : task.end_chunk]
        return [(target[start:end], source[start:end]) for chunk in ranges for start, end in chunk]

    def transfer(self, task: TransferTask) -> None:
        """Copy on the calling thread: for a device tier's stand-in in host memory."""
        for target, source in self.parts(task):
            target.copy_(source)


class IssuedCopy:
    """A copy that has been issued, with the events around it."""

    def __init__(self, accelerator: Accelerator):
        self.begun, self.done = (accelerator.make_event(timed=True) for _ in range(2))
        self.reached: Event | None = None
        """Where the computation waits for it; None: it was not joined."""
        self.issued_at = time.perf_counter()

    def stall_seconds(self) -> float:
        """Return how long the computation has waited, when the copy has ended."""
        if self.reached is None or not self.reached.query():
            return 0.0  # the computation has yet to get there
        return max(0.0, 1e-3 * self.reached.elapsed_time(self.done))


class DeviceRing(Ring):
    """Copies to a device, issued by the model's thread and done during the computation.

    Two orders must hold. A computation may read a slot only after its copy has ended: either its
    event has passed, or the computing stream waits for it, since `join`. A copy may overwrite a
    slot only after the last computation with it has ended, which the CPU has launched but not
    awaited: `computed` records an event on the computing stream, and the copy stream waits for that
    event before it writes.
    """

    can_join = True

    def __init__(self, arrivals: Arrivals, copies: ArenaCopies, accelerator: Accelerator):
        self._arrivals = arrivals
        self._copies = copies
        self._accelerator = accelerator
        self._stream = accelerator.make_stream()
        self._computed: dict[int, Event] = {}
        self._running: dict[int, IssuedCopy] = {}
        self._stalls: dict[int, float] = {}
        self.errors: dict[int, TransferError] = {}
        # The arena may lie where earlier work of the computing stream, still under way, writes.
        accelerator.synchronize()

    def submit(self, ticket: int, task: TransferTask) -> None:
        fence = self._computed.pop(task.slot, None) if task.first_chunk == 0 else None
        copy = IssuedCopy(self._accelerator)
        with self._accelerator.use(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            copy.begun.record(self._stream)
            for target, source in self._copies.parts(task):
                self._accelerator.copy(target, source)
            copy.done.record(self._stream)
        self._running[ticket] = copy

    def cancel(self, ticket: int) -> bool:  # noqa: ARG002
        """Return False: a copy begins when it is submitted."""
        return False

    def poll(self) -> None:
        for ticket, copy in list(self._running.items()):
            if not copy.done.query():
                break  # one stream: those after it have not ended either
            self._arrive(ticket)

    def wait_first(self) -> bool:
        for ticket, copy in list(self._running.items()):
            copy.done.synchronize()  # releases the interpreter's lock
            self._arrive(ticket)
            return True
        return False

    def join(self, ticket: int) -> None:
        copy, computing = self._running[ticket], self._accelerator.current_stream()
        copy.reached = self._accelerator.make_event(timed=True)
        copy.reached.record(computing)
        computing.wait_event(copy.done)

    def take_stall(self, ticket: int) -> float:
        return self._stalls.pop(ticket)

    def _arrive(self, ticket: int) -> None:
        copy = self._running.pop(ticket)
        if copy.reached is not None:
            self._stalls[ticket] = copy.stall_seconds()
        self._arrivals.post(ticket, 0, 1e-3 * copy.begun.elapsed_time(copy.done))

    def running(self) -> list[tuple[int, float]]:
        now = time.perf_counter()
        return [(ticket, now - copy.issued_at) for ticket, copy in self._running.items()]

    def computed(self, slots: Collection[int]) -> None:
        event = self._accelerator.make_event()
        event.record(self._accelerator.current_stream())
        self._computed.update(dict.fromkeys(slots, event))

    def wait_for_computation(self) -> None:
        issued = self._accelerator.make_event()
        issued.record(self._accelerator.current_stream())
        self._stream.wait_event(issued)

    def close(self, seconds: float) -> bool:  # noqa: ARG002
        self._stream.synchronize()
        return True
