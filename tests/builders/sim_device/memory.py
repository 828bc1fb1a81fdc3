"""Allocations of a simulated device: their size, and which accesses are ordered.

Every access carries the time of its stream. One that conflicts with an access of another stream,
and that no event and no wait of the host orders after it, is a race, also where it went well.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.builders.sim_device.streams import SimDevices, SimStream

Span = tuple[int, int, bool]
"""First byte, end, and whether it is written."""


class DeviceMemory:
    """The bytes of one device.

    Args:
        num_bytes: of all its memory; more allocations fail as on a GPU.
    """

    def __init__(self, device: torch.device, num_bytes: int):
        self.device = device
        self.num_bytes = num_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        """Most that was used: the allocator keeps it, and the device lacks it."""
        self._lock = threading.RLock()

    def restrict(self, num_bytes: int) -> None:
        """Leave so many bytes: others have what is not used now."""
        self.num_bytes, self.peak_bytes = self.used_bytes + num_bytes, self.used_bytes

    def take(self, num_bytes: int) -> None:
        """Count an allocation.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        with self._lock:
            free_bytes = self.num_bytes - self.used_bytes
            if num_bytes > free_bytes:
                raise torch.OutOfMemoryError(
                    f"SIM out of memory. Tried to allocate {num_bytes} bytes. GPU "
                    f"{self.device.index} has a total capacity of {self.num_bytes} bytes of which "
                    f"{free_bytes} bytes is free."
                )
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= num_bytes


class Allocation:
    """The storage of a tensor and of its views.

    Args:
        stream: that it is allocated on: earlier work of this stream may still use the bytes, and
            they go back to it.
    """

    def __init__(self, memory: DeviceMemory, num_bytes: int, stream: SimStream):
        memory.take(num_bytes)
        self.memory = memory
        self._devices: SimDevices = stream.devices
        self._num_bytes = num_bytes
        self._stream = stream
        self._spans: dict[SimStream, dict[Span, int]] = {}
        """The time of each access, by stream."""
        self._spans[stream] = {(0, num_bytes, True): stream.time}

    def access(self, stream: SimStream, start: int, end: int, *, writes: bool, what: str) -> None:
        """Check and note an access by a stream's latest work."""
        for other, known in self._spans.items():
            seen = stream.clock[other.number]
            for span, time in list(known.items()):
                first, last, wrote = span
                if first >= end or start >= last or not (wrote or writes):
                    continue
                if other is not stream and time > seen:
                    self._devices.races.append(
                        f"{what} on {stream} {'writes' if writes else 'reads'} bytes {start} to "
                        f"{end}, {'written' if wrote else 'read'} by {other}, which it does not "
                        "wait for"
                    )
                if writes and start <= first and last <= end:
                    del known[span]  # this access is ordered after it
        self._spans.setdefault(stream, {})[start, end, writes] = stream.time

    def __del__(self) -> None:
        if not hasattr(self, "_spans"):
            return  # it did not fit
        for other, known in self._spans.items():
            if other is self._stream or not known:
                continue
            number = other.number
            if max(known.values()) > max(self._stream.clock[number], self._devices.host[number]):
                race = f"memory of {self._stream} is freed, and {other} may still use it"
                self._devices.races.append(race)
        self.memory.give_back(self._num_bytes)


class Clock(dict[int, int]):
    """The latest time known of each stream, by its number."""

    def __missing__(self, number: int) -> int:
        return 0

    def join(self, other: Clock) -> None:
        """Know what the other knows, too."""
        for number, time in other.items():
            if time > self[number]:
                self[number] = time
