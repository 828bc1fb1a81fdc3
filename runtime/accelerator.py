"""Streams, events, memory, random states and copies to the host, by one path for all accelerators.

CUDA and ROCm (whose device type is also `cuda`) and XPU have streams and pinned memory. MPS has
one queue: copies run in the order of the computation, and pinning is not needed. Calls that
`torch.accelerator` does not offer stand here and nowhere else.

For each copy to the host, the host waits until the device has computed all that was issued: several
tensors are one copy, and a choice is copied once.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

ACCELERATOR_TYPES = ("cuda", "xpu", "mps")
"""Device types that experts are served on, other than cpu."""
PINNED_CACHED_MIB = 1
"""Largest pinned memory that PyTorch rounds up and keeps: what a step sends is smaller."""


class Event(Protocol):
    """A point in a stream's work, which `torch.Event` is."""

    def record(self, stream: Any, /) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds until another event; both have passed and are timed."""


class Stream(Protocol):
    """A queue of a device's work, which `torch.Stream` is."""

    def wait_event(self, event: Any, /) -> None: ...

    def synchronize(self) -> None: ...


class Accelerator:
    """The operations that copies to a device with streams are ordered with: CUDA, ROCm, XPU."""

    pins_memory = True
    """Copies from pinned memory run during the computation."""

    def __init__(self, device: torch.device):
        self._device = device
        pin_exact_sizes()

    def make_stream(self) -> Stream:
        return torch.Stream(self._device)

    def make_event(self, *, timed: bool = False) -> Event:
        return torch.Event(self._device, enable_timing=timed)

    def current_stream(self) -> Stream:
        """Return the stream that the calling thread computes on."""
        return torch.accelerator.current_stream(self._device)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Issue the calling thread's work to a stream within the context."""
        # `with stream` keeps what to restore in the stream object: not for threads that share it.
        assert isinstance(stream, torch.Stream)
        device_index = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(stream)  # of its device, which becomes the current one
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device_index)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Issue a copy to the current stream."""
        target.copy_(source, non_blocking=self.pins_memory)

    def synchronize(self) -> None:
        """Wait for all work issued to the device."""
        torch.accelerator.synchronize(self._device)


@dataclass
class DeviceQueue:
    """A device's only queue as a stream and as an event: its work is ordered anyway."""

    device: torch.device
    recorded_at: float = field(default=0.0, compare=False)

    def wait_event(self, event: Event, /) -> None:
        """Nothing to wait for: later work runs after all that was issued before."""

    def record(self, stream: Stream, /) -> None:  # noqa: ARG002
        """Note the time; `synchronize` waits for all work issued so far."""
        self.recorded_at = time.perf_counter()

    def query(self) -> bool:
        """Return whether the work has ended, after waiting for it."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def elapsed_time(self, end: "DeviceQueue", /) -> float:
        """Return the host's time between them: it waits for copies."""
        return 1e3 * (end.recorded_at - self.recorded_at)


class QueueAccelerator(Accelerator):
    """A device with a single queue: MPS."""

    pins_memory = False

    def make_stream(self) -> DeviceQueue:
        return DeviceQueue(self._device)

    current_stream = make_stream

    def make_event(self, *, timed: bool = False) -> DeviceQueue:  # noqa: ARG002
        return DeviceQueue(self._device)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:  # noqa: ARG002
        yield


@functools.cache
def pin_exact_sizes() -> None:
    """Let PyTorch pin as many bytes as it is asked for, and free them.

    By default it rounds up to a power of two, up to twice a budget, and keeps all for reuse. What
    the user has set, in `PYTORCH_ALLOC_CONF`, stays. PyTorch has no public function for it, so that
    a later version may round.
    """
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        return
    given = torch._C._accelerator_getAllocatorSettings()
    settings = [f"pinned_max_cached_size_mb:{PINNED_CACHED_MIB}", given]
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, settings)))


def is_accelerator(device: torch.device) -> bool:
    return device.type in ACCELERATOR_TYPES


def open_accelerator(device: torch.device) -> Accelerator | None:
    """Return a device's streams and events; None for the CPU, which computes at once."""
    if not is_accelerator(device):
        return None
    return QueueAccelerator(device) if device.type == "mps" else Accelerator(device)


def find_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this torch can use here; None without one."""
    return torch.accelerator.current_accelerator(check_available=True)


def list_accelerators() -> list[torch.device]:
    kind = find_accelerator()
    if kind is None or not is_accelerator(kind):
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of host memory on a device; the host does not wait."""
    if device.type not in ("cpu", "mps"):
        tensor = tensor.pin_memory()  # the allocator keeps it until the copy has ended
    return tensor.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait for all work issued to a device; the CPU's has ended."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def read_free_memory(device: torch.device) -> int:
    """Return the free bytes of an accelerator's memory, and those that PyTorch keeps for reuse."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return torch.accelerator.get_memory_info(device)[0] + kept


def describe_accelerator(device: torch.device) -> dict[str, Any]:
    """Return an accelerator's name and the bytes of its memory."""
    if device.type == "mps":
        return {"name": "MPS", "memory_bytes": torch.mps.recommended_max_memory()}
    properties = torch.get_device_module(device).get_device_properties(device)
    return {"name": properties.name, "memory_bytes": properties.total_memory}


RandomStates = dict[torch.device, Tensor]


def seed_random(seed: int, device: torch.device) -> RandomStates:
    """Return what `torch.manual_seed(seed)` makes of the states of the CPU and of a device."""
    devices = dict.fromkeys((torch.device("cpu"), device))
    return {one: torch.Generator(one).manual_seed(seed).get_state() for one in devices}


def change_random(states: RandomStates) -> RandomStates:
    """Put random states in force; returns those before, of the same devices."""
    before = {}
    for device, state in states.items():
        if device.type == "cpu":
            before[device] = torch.get_rng_state()
            torch.set_rng_state(state)
        else:
            module = torch.get_device_module(device)
            before[device] = module.get_rng_state(device)
            module.set_rng_state(state, device)
    return before


def find_numa_node(device: torch.device, pci: Path) -> int | None:
    """Return the NUMA node of a CUDA device; None where it is not known.

    Args:
        pci: folder of the kernel's PCI devices.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )
    file = pci / address / "numa_node"
    node = int(file.read_text()) if file.is_file() else -1
    return None if node < 0 else node  # -1: the firmware does not say


KNOWN = "moecast_copy"
"""Attribute of tensors whose copy in host memory is kept."""


class KnownCopy(NamedTuple):
    """A tensor in host memory, and the version of what it is a copy of."""

    tensor: Tensor
    version: int


def copy_together(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return tensors of one device in host memory, by one copy; None stays None."""
    given = [tensor for tensor in tensors if tensor is not None]
    if len(given) == 1:
        return [None if tensor is None else tensor.cpu() for tensor in tensors]
    # The widest numbers first: every part begins at a multiple of its own.
    given.sort(key=lambda tensor: -tensor.itemsize)
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in given]
    copied = torch.cat(parts).cpu().split([len(part) for part in parts])
    found = {
        id(tensor): part.view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(given, copied, strict=True)
    }
    return [None if tensor is None else found[id(tensor)] for tensor in tensors]


def keep_copy(tensor: Tensor, copied: Tensor) -> None:
    """Let `host_copy` return this copy of a tensor of a device, until the tensor is changed."""
    if not tensor.is_inference():  # those have no version
        setattr(tensor, KNOWN, KnownCopy(copied, tensor._version))


def host_copy(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory: the copy that is kept of it, or a new one."""
    if tensor.is_cpu:
        return tensor
    known: KnownCopy | None = getattr(tensor, KNOWN, None)
    if known is not None and known.version == tensor._version:
        return known.tensor
    return tensor.cpu()
