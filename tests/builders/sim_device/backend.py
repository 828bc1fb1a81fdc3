"""What `torch` and `torch.accelerator` show of simulated devices."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _device
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from runtime import accelerator
from runtime.engine import devices as known_devices  # not first within a simulation, to stay so
from tests.builders.sim_device.streams import SimDevices, SimEvent, SimStream, make_state
from tests.builders.sim_device.tensor import SimGenerator, SimTensor, is_pinned, is_sim, run

CREATING = ("empty", "zeros", "ones", "full")
"""Functions that may be asked for pinned memory."""


class SimModule:
    """`torch.get_device_module("sim")`, and `torch.sim`."""

    def is_available(self) -> bool:
        return SimDevices.exist()

    def device_count(self) -> int:
        return len(SimDevices.current().devices) if SimDevices.exist() else 0

    def _is_in_bad_fork(self) -> bool:
        return not SimDevices.exist()  # then nothing is seeded

    def manual_seed_all(self, seed: int) -> None:
        devices = SimDevices.current()
        devices.random_states = [make_state(seed) for _ in devices.devices]

    def get_rng_state(self, device: Any = None) -> Tensor:
        devices = SimDevices.current()
        return devices.random_states[devices.resolve(device).index].clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        devices = SimDevices.current()
        devices.random_states[devices.resolve(device).index] = state.clone()

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        memory = SimDevices.current().memory(device)
        return SimpleNamespace(name="Simulated", total_memory=memory.num_bytes)


RESIZING = ("arange", "arange.start", "arange.start_step", "eye", "eye.m")
"""Functions that PyTorch composes of an empty tensor and a kernel that changes its shape."""


@functools.cache
def set_up() -> list[torch.library.Library]:
    """Make the device type known to this process, once."""
    _setup_privateuseone_for_python_backend("sim", backend_module=SimModule())
    others, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    for name in RESIZING:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, functools.partial(run_one, func), "PrivateUse1")
    return [others, aten]


def run_one(func: Any, *args: Any, **kwargs: Any) -> Any:
    return run(func, args, kwargs)


@contextlib.contextmanager
def simulated(*, memory_bytes: int = 1 << 30, seed: int = 0) -> Iterator[SimDevices]:
    """Give PyTorch and this project two simulated devices within the context.

    Raises:
        AssertionError: something ran in an order that no event guarantees.
    """
    set_up()
    with SimDevices(memory_bytes, seed) as devices, contextlib.ExitStack() as stack:
        for owner, name, value in find_patches(devices):
            stack.enter_context(patch.object(owner, name, value))
        yield devices
        for device in devices.devices:
            devices.synchronize(device)
    assert not devices.races, devices.races[:3]


def find_patches(devices: SimDevices) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: owner, name and the replacement."""
    kind = torch.device("sim")
    # What a `with torch.device(...)` changes are PyTorch's own functions, under those below.
    constructors = _device._device_constructors()
    yield _device, "_device_constructors", lambda: constructors
    for module in (accelerator, known_devices):
        yield module, "ACCELERATOR_TYPES", (*accelerator.ACCELERATOR_TYPES, "sim")
    for name, function in {
        "current_accelerator": lambda *_, **__: kind,
        "is_available": lambda: True,
        "device_count": lambda: len(devices.devices),
        "current_device_index": lambda: devices.index,
        "set_device_index": lambda device: devices.set_index(devices.resolve(device).index),
        "current_stream": devices.stream,
        "set_stream": devices.set_stream,
        "synchronize": devices.synchronize,
        "get_memory_info": lambda device=None: (
            devices.memory(device).num_bytes - devices.memory(device).peak_bytes,
            devices.memory(device).num_bytes,
        ),
        "memory_reserved": lambda device=None: devices.memory(device).peak_bytes,
        "memory_allocated": lambda device=None: devices.memory(device).used_bytes,
    }.items():
        yield torch.accelerator, name, function
    yield torch, "Stream", SimStream
    yield torch, "Event", SimEvent
    yield torch, "Generator", SimGenerator
    for name in CREATING:
        yield torch, name, pinning(devices, getattr(torch, name))
    for name in ("tensor", "as_tensor"):
        yield torch, name, making(getattr(torch, name))
    tolist, pinned = Tensor.tolist, Tensor.is_pinned
    yield Tensor, "tolist", lambda self: tolist(self.cpu() if is_sim(self.device) else self)

    def is_pinned_here(self: Tensor, *args: Any) -> bool:
        return is_pinned(self) if self.device.type == "cpu" else pinned(self, *args)

    yield Tensor, "is_pinned", is_pinned_here
    yield Tensor, "pin_memory", lambda self, *_: pin(devices, self)


def pin(devices: SimDevices, tensor: Tensor) -> Tensor:
    if isinstance(tensor, SimTensor):
        raise RuntimeError("cannot pin 'torch.sim.Tensor': only dense CPU tensors can be pinned")
    pinned = tensor if is_pinned(tensor) else tensor.clone()
    devices.pinned.add(pinned.untyped_storage().data_ptr())
    devices.largest_pin = max(devices.largest_pin, count_pinned(pinned.nbytes))
    return pinned


def count_pinned(num_bytes: int) -> int:
    """Return the bytes that PyTorch takes (`ATen/core/CachingHostAllocator.h`, `allocate`)."""
    settings = torch._C._accelerator_getAllocatorSettings()
    cached = re.search(r"pinned_max_cached_size_mb:(\d+)", settings)
    is_exact = cached is not None and num_bytes > int(cached[1]) << 20
    return num_bytes if is_exact else 1 << (num_bytes - 1).bit_length()


def pinning(devices: SimDevices, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function, with memory that the devices have pinned where it is asked for."""

    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return pin(devices, tensor) if pin_memory else tensor

    return made


def making(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function, which makes a tensor of a device from the host's numbers by a copy."""

    @functools.wraps(make)
    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, SimTensor) or is_sim(device):
            tensor = data if isinstance(data, Tensor) else make(data, *args, **kwargs)
            place = tensor.device if device is None else device
            return tensor.to(place, kwargs.get("dtype"), copy=make is torch_tensor)
        return make(data, *args, device=device, **kwargs)

    return made


torch_tensor = torch.tensor
