"""A stand-in device that shows which order streams and events guarantee, whatever came to pass.

Each stream has a vector clock, and so has the host. Issuing work, recording an event, and waiting
for one are the edges; a slot of the arena remembers its last copy and its reads. Work on a slot
that no edge orders after the last conflicting work is a race, also where it went well this time.
Copies run as late as the edges allow: when somebody waits for them.

All threads of the host are one: their locks are tested elsewhere.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

HOST = "host"
SPOILED = 0x7F
"""Bytes of a slot whose copy has been issued and has not run; of a float: a very large number."""

Clock = Counter


class OrderedStream:
    def __init__(self, device: "OrderedAccelerator", name: str):
        self.device, self.name = device, name
        self.clock: Clock = Counter()
        self.pending: list = []
        """Copies that have been issued and have not run."""

    def wait_event(self, event: "OrderedEvent") -> None:
        with self.device.lock:
            self.clock |= event.clock

    def synchronize(self) -> None:
        with self.device.lock:
            self.device.clock |= self.clock
            self.run()

    def run(self) -> None:
        with _disable_current_modes():  # a copy's own reads are none of the computation
            for target, source in self.pending:
                target.copy_(source)
        self.pending.clear()


class OrderedEvent:
    def __init__(self, device: "OrderedAccelerator"):
        self.device = device
        self.clock: Clock = Counter()
        self.stream: OrderedStream | None = None

    def record(self, stream: OrderedStream) -> None:
        with self.device.lock:
            self.device.issue(stream)
            self.clock, self.stream = stream.clock.copy(), stream

    def query(self) -> bool:
        """Copies run as late as they may: none has ended by itself."""
        return False

    def synchronize(self) -> None:
        with self.device.lock:
            self.device.clock |= self.clock
            if self.stream is not None:
                self.stream.run()


class Slot:
    def __init__(self) -> None:
        self.copied: Clock = Counter()
        self.read: Clock = Counter()


class OrderedAccelerator:
    """Has the operations of `runtime.accelerator.Accelerator` for an arena in host memory."""

    pins_memory = False

    def __init__(self, arena):
        self.arena = arena
        self.lock = threading.RLock()
        self.clock: Clock = Counter({HOST: 1})
        self.races: list[str] = []
        self.num_copies = self.num_reads = 0
        self._slots = [Slot() for _ in range(arena.num_slots)]
        self._computing = OrderedStream(self, "computing")
        self._streams = [self._computing]
        self._local = threading.local()

    # ---- operations that rings use

    def make_stream(self) -> OrderedStream:
        self._streams.append(OrderedStream(self, f"copies {len(self._streams)}"))
        return self._streams[-1]

    def make_event(self) -> OrderedEvent:
        return OrderedEvent(self)

    def current_stream(self) -> OrderedStream:
        return getattr(self._local, "stream", self._computing)

    @contextmanager
    def use(self, stream: OrderedStream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self.lock:
            self.num_copies += 1
            now = self.issue(self.current_stream())
            for number in self._slots_of(target):
                slot = self._slots[number]
                self._check(now, slot.read, f"slot {number} is overwritten, its use not ended")
                self._check(now, slot.copied, f"slot {number} is overwritten by two streams")
                slot.copied = Counter({self.current_stream().name: now[self.current_stream().name]})
                slot.read.clear()
            with _disable_current_modes():
                target.fill_(SPOILED)
            self.current_stream().pending.append((target, source))

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    # ---- clocks

    def issue(self, stream: OrderedStream) -> Clock:
        """Count a piece of work, which begins after all that the host has done; its time."""
        self.clock[HOST] += 1
        stream.clock |= self.clock
        stream.clock[stream.name] += 1
        return stream.clock

    def read(self, tensor: Tensor) -> None:
        """Check a computation's reading, on the calling thread's stream."""
        for number in self._slots_of(tensor):
            with self.lock:
                self.num_reads += 1
                stream, slot = self.current_stream(), self._slots[number]
                now = self.issue(stream)
                self._check(now, slot.copied, f"slot {number} is read, its copy not ended")
                slot.read[stream.name] = now[stream.name]

    def _check(self, now: Clock, before: Clock, race: str) -> None:
        if not before <= now:
            self.races.append(race)

    def _slots_of(self, tensor: Tensor) -> range:
        """Slots that the tensor lies in; none where it is not in the arena."""
        first = self.arena.slot(0)
        start = tensor.data_ptr() - first.data_ptr()
        if not 0 <= start < self.arena.num_bytes or not tensor.nbytes:
            return range(0)
        return range(start // len(first), (start + tensor.nbytes - 1) // len(first) + 1)


class WatchedReads(TorchDispatchMode):
    """Within the context, every operation of this thread that reads the arena is checked.

    Views are none: they read nothing yet.
    """

    def __init__(self, device: OrderedAccelerator):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func.is_view:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._device.read(leaf)
        return func(*args, **kwargs)
