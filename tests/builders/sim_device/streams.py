"""Streams and events of simulated devices, whose copies run late.

A kernel computes when it is issued, after all that its stream has to wait for. A copy between the
host and a device waits in its stream until somebody waits for it, or a seeded choice lets it run;
until then its target is spoiled. What kernels could do late is seen by their clocks (`memory`).

All threads of the host are one: their locks are tested elsewhere.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from tests.builders.sim_device.memory import Clock, DeviceMemory

SPOILED = 0x7F
"""Bytes of a target whose copy has not run; of a float: a very large number, or none."""
EARLY = 0.25
"""Probability that a waiting copy runs when other work is issued, or somebody asks for it."""


class SimStream:
    """A queue of a device's work. `torch.Stream` on a simulated device makes one."""

    def __init__(self, device: torch.device | str | None = None, **_: object):
        devices = SimDevices.current()
        self.devices = devices
        self.device = devices.resolve(device)
        self.number = len(devices.streams)
        self.clock: Clock = Clock()
        self.time = 0
        self.seconds = 0.0
        """When its latest work ends, on the clock of timed events."""
        self._waiting: deque[Callable[[], None]] = deque()
        """Copies and waits that have been issued and have not run."""
        self._num_done = 0
        devices.streams.append(self)

    def __str__(self) -> str:
        return f"stream {self.number} of {self.device}"

    def issue(self, seconds: float = 0.0) -> None:
        """Count a piece of work, which begins after all that the host has seen."""
        self.seconds += seconds
        self.clock.join(self.devices.host)
        self.time += 1
        self.clock[self.number] = self.time

    def put(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)

    @property
    def num_issued(self) -> int:
        return self._num_done + len(self._waiting)

    def has_run(self, number: int) -> bool:
        return self._num_done >= number

    def run(self, number: int | None = None) -> None:
        """Run what waits, or until so many pieces of work have run since the beginning."""
        end = self.num_issued if number is None else number
        while self._num_done < end:
            work = self._waiting.popleft()
            self._num_done += 1
            work()

    def wait_event(self, event: SimEvent) -> None:
        with self.devices.lock:
            if event.stream is not None:
                self.clock.join(event.clock)
                self.seconds = max(self.seconds, event.seconds)
                self.put(event.run)

    def wait_stream(self, stream: SimStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        event = event or SimEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        with self.devices.lock:
            self.devices.counts["synchronisations"] += 1
            self.run()
            self.devices.host.join(self.clock)


class SimEvent:
    """A point in a stream's work. `torch.Event` on a simulated device makes one."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: object):
        self._devices = SimDevices.current()
        self._is_timed = enable_timing
        self.seconds = 0.0
        self._device = None if device is None else self._devices.resolve(device)
        self.clock: Clock = Clock()
        self.stream: SimStream | None = None
        self._number = 0

    def record(self, stream: SimStream | None = None) -> None:
        with self._devices.lock:
            self.stream = stream or self._devices.stream(self._device)
            if self._device is not None and self.stream.device != self._device:
                raise RuntimeError("Event device does not match recording stream's device")
            self.stream.issue()
            self.clock, self._number = Clock(self.stream.clock), self.stream.num_issued
            self.seconds = self.stream.seconds

    def run(self) -> None:
        if self.stream is not None:
            self.stream.run(self._number)

    def query(self) -> bool:
        """Return whether the work has ended: a waiting copy may, by the seed, end now."""
        if self.stream is None:
            return True
        with self._devices.lock:
            self._devices.counts["queries"] += 1
            if not self.stream.has_run(self._number):
                if self._devices.random.random() >= EARLY:
                    return False
                self.run()
            self._devices.host.join(self.clock)
            return True

    def elapsed_time(self, end: SimEvent) -> float:
        """Return the milliseconds between two events that have passed."""
        for event in (self, end):
            if not event._is_timed:
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if event.stream is None or not event.stream.has_run(event._number):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * (end.seconds - self.seconds)

    def synchronize(self) -> None:
        if self.stream is None:
            return
        with self._devices.lock:
            self._devices.counts["synchronisations"] += 1
            self.run()
            self._devices.host.join(self.clock)


class SimDevices:
    """The devices of one test, `sim:0` and `sim:1`.

    Args:
        memory_bytes: of each.
        seed: of the order in which waiting copies run.
    """

    _current: SimDevices | None = None

    def __init__(self, memory_bytes: int, seed: int):
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.host: Clock = Clock()
        """What the host has waited for."""
        self.races: list[str] = []
        self.counts: Counter[str] = Counter()
        """Launches, copies, synchronisations with the host."""
        self.pinned: set[int] = set()
        """Addresses of the host's pinned storages."""
        self.largest_pin = 0
        """Bytes that PyTorch would take for the largest of them."""
        self.streams: list[SimStream] = []
        self.devices = [torch.device("sim", number) for number in range(2)]
        self.memories = [DeviceMemory(device, memory_bytes) for device in self.devices]
        self.random_states = [make_state(0) for _ in self.devices]
        self._local = threading.local()
        self._defaults: list[SimStream] = []

    def __enter__(self) -> SimDevices:
        assert SimDevices._current is None
        SimDevices._current = self
        self._defaults = [SimStream(device) for device in self.devices]
        return self

    def __exit__(self, *_: object) -> None:
        SimDevices._current = None

    @staticmethod
    def exist() -> bool:
        return SimDevices._current is not None

    @staticmethod
    def current() -> SimDevices:
        assert SimDevices._current is not None, "used outside of `simulated()`"
        return SimDevices._current

    # ---- the calling thread's device and streams

    @property
    def index(self) -> int:
        return getattr(self._local, "index", 0)

    def set_index(self, index: int) -> None:
        if not 0 <= index < len(self.devices):
            raise RuntimeError(f"SIM error: invalid device ordinal {index}")
        self._local.index = index

    def resolve(self, device: torch.device | str | int | None) -> torch.device:
        """Return a device with its index: the thread's own by default."""
        if isinstance(device, int):
            return self.devices[device]
        index = None if device is None else torch.device(device).index
        index = self.index if index is None else index
        if index >= len(self.devices):
            raise RuntimeError(f"SIM error: invalid device ordinal {index}")
        return self.devices[index]

    def memory(self, device: torch.device | str | int | None = None) -> DeviceMemory:
        return self.memories[self.resolve(device).index]

    def stream(self, device: torch.device | str | int | None = None) -> SimStream:
        """Return the stream that the calling thread issues work to."""
        index = self.resolve(device).index
        chosen: dict[int, SimStream] = getattr(self._local, "streams", {})
        return chosen.get(index, self._defaults[index])

    def set_stream(self, stream: SimStream) -> None:
        index = stream.device.index
        self._local.streams = {**getattr(self._local, "streams", {}), index: stream}
        self.set_index(index)

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        resolved = self.resolve(device)
        with self.lock:
            self.counts["synchronisations"] += 1
            for stream in self.streams:
                if stream.device == resolved:
                    stream.run()
                    self.host.join(stream.clock)

    def take_races(self) -> list[str]:
        """Return what has raced by the end of the work under way, once."""
        self.synchronize("sim")
        races, self.races = self.races, []
        return races

    def run_some(self) -> None:
        """Let waiting copies run early, by the seed."""
        for stream in self.streams:
            if stream._waiting and self.random.random() < EARLY:
                stream.run(stream._num_done + 1)


def make_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()
