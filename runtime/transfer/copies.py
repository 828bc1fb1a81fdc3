"""Copies from an arena in host memory to the one above it."""

import time

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


class DeviceRing(Ring):
    """Copies to a device, issued by the model's thread and done during the computation.

    Two orders must hold. A computation may read a slot only after its copy has ended: the copy
    arrives when its event has passed, and only then does the policy core count it. A copy may
    overwrite a slot only after the last computation with it has ended, which the CPU has launched
    but not awaited: `computed` records an event on the computing stream, and the copy stream waits
    for that event before it writes.
    """

    def __init__(self, arrivals: Arrivals, copies: ArenaCopies, accelerator: Accelerator):
        self._arrivals = arrivals
        self._copies = copies
        self._accelerator = accelerator
        self._stream = accelerator.make_stream()
        self._computed: dict[int, Event] = {}
        self._running: dict[int, tuple[Event, float]] = {}
        self.errors: dict[int, TransferError] = {}
        # The arena may lie where earlier work of the computing stream, still under way, writes.
        accelerator.synchronize()

    def submit(self, ticket: int, task: TransferTask) -> None:
        fence = self._computed.pop(task.slot, None) if task.first_chunk == 0 else None
        done = self._accelerator.make_event()
        with self._accelerator.use(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            for target, source in self._copies.parts(task):
                self._accelerator.copy(target, source)
            done.record(self._stream)
        self._running[ticket] = done, time.perf_counter()

    def cancel(self, ticket: int) -> bool:  # noqa: ARG002
        """Return False: a copy begins when it is submitted."""
        return False

    def poll(self) -> None:
        for ticket, (done, _) in list(self._running.items()):
            if not done.query():
                break  # one stream: those after it have not ended either
            self._arrive(ticket)

    def wait_first(self) -> bool:
        for ticket, (done, _) in list(self._running.items()):
            done.synchronize()  # releases the interpreter's lock
            self._arrive(ticket)
            return True
        return False

    def _arrive(self, ticket: int) -> None:
        _, began = self._running.pop(ticket)
        self._arrivals.post(ticket, 0, time.perf_counter() - began)

    def running(self) -> list[tuple[int, float]]:
        now = time.perf_counter()
        return [(ticket, now - began) for ticket, (_, began) in self._running.items()]

    def computed(self, slot: int) -> None:
        event = self._computed.get(slot)
        if event is None:
            event = self._computed[slot] = self._accelerator.make_event()
        event.record(self._accelerator.current_stream())

    def wait_for_computation(self) -> None:
        issued = self._accelerator.make_event()
        issued.record(self._accelerator.current_stream())
        self._stream.wait_event(issued)

    def close(self, seconds: float) -> bool:  # noqa: ARG002
        self._stream.synchronize()
        return True
