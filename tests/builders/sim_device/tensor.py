"""Tensors of simulated devices: each operation runs on the CPU inside, as a GPU would allow it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.builders.sim_device.memory import Allocation
from tests.builders.sim_device.streams import SPOILED, SimDevices, SimStream, make_state

KERNEL_SECONDS, COPY_SECONDS, SECONDS_PER_BYTE = 5e-6, 1e-5, 1e-10
"""What a kernel and a copy take, on the clock of timed events."""
FAR = 1 << 60
"""Added to addresses: no host memory is there, so that reading one ends the process."""
WAITED_FOR = ("_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero")
WAITED_FOR += ("repeat_interleave.Tensor", "unique_consecutive", "unique_dim")
SYNCHRONISING = {f"aten::{name}" for name in WAITED_FOR}
"""Kernels whose result, or the shape of it, the host waits for."""
UNREAD = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach", "aten::lift")
"""Beginnings of operations that launch nothing."""
INDEXED_BY_HOST = {
    *("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_"),
    *("aten::_unsafe_index_put", "aten::_index_put_impl_"),
}
"""Whose indices may lie in host memory: they are copied, and the host waits."""
MASKS = (torch.bool, torch.uint8)
"""Types of indices that say of each row whether it is taken."""
CPU = torch.device("cpu")
ELSEWHERE = "Expected all tensors to be on the same device"


class SimTensor(Tensor):
    """A tensor whose bytes, `raw`, only operations of its device see."""

    raw: Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, raw: Tensor, allocation: Allocation) -> SimTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=allocation.memory.device,
        )  # fmt: skip
        tensor.raw, tensor.allocation = raw, allocation
        return tensor

    def __init__(self, raw: Tensor, allocation: Allocation): ...

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self) -> int:
        return self.raw.data_ptr() + FAR if self.raw.numel() else 0

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        return self.detach().cpu().numpy()

    def __deepcopy__(self, memo: dict) -> Tensor:
        with torch.no_grad():
            copied = self.detach().clone()
        memo[id(self)] = copied
        return copied

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        assert isinstance(other, SimTensor)
        self.raw, self.allocation = other.raw, other.allocation

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.dim() == 0 else object.__format__(self, form)

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


def is_sim(device: Any) -> bool:
    return device is not None and torch.device(device).type == "sim"


def is_on_sim(value: Any) -> bool:
    return type(value) is SimTensor  # faster than `isinstance`, and called very often


def wrap(raw: Tensor, stream: SimStream) -> SimTensor:
    """Return a new tensor of the stream's device, with memory of its own."""
    memory = stream.devices.memories[stream.device.index]
    return SimTensor(raw, Allocation(memory, raw.untyped_storage().nbytes(), stream))


def touch(tensor: SimTensor, stream: SimStream, *, writes: bool, what: str) -> None:
    """Note that the stream's latest work reads or writes a tensor."""
    raw = tensor.raw
    if not raw.numel():
        return
    start, size = raw.storage_offset(), raw.itemsize
    if raw.is_contiguous():
        end = start + raw.numel()
    else:
        end = start + 1 + sum((n - 1) * s for n, s in zip(raw.shape, raw.stride(), strict=True))
    tensor.allocation.access(stream, start * size, end * size, writes=writes, what=what)


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in SimDevices.current().pinned


# ---- operations


@dataclass(frozen=True, slots=True)
class Operation:
    """What is the same in all calls of an operation."""

    func: Any
    name: str
    launches: bool
    written: frozenset[int | str]
    """The arguments that it writes to, by position and by name."""
    is_new: bool
    """Whether its results have memory of their own, where they are no arguments."""
    is_waited_for: bool
    is_random: bool


@cache
def describe(func: Any) -> Operation:
    schema, written = func._schema, set()
    name = schema.name
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {argument.name} if argument.kwarg_only else {argument.name, number}
    is_unread = name.startswith(UNREAD)
    is_alias = any(result.alias_info is not None for result in schema.returns)
    return Operation(
        func=func, name=name, written=frozenset(written),
        launches=not (func.is_view or is_unread or name == "aten::alias"),
        is_new=not (is_unread or is_alias or func._can_decompose()),
        is_waited_for=not SYNCHRONISING.isdisjoint((name, f"{name}.{func._overloadname}")),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
    )  # fmt: skip


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation that has a tensor, or a device, that is simulated."""
    devices, called = SimDevices.current(), describe(func)
    with devices.lock:
        devices.run_some()
        if called.name == "aten::_to_copy":
            return convert(devices, args[0], kwargs)
        if called.name in ("aten::copy_", "aten::_copy_from"):
            return copy(devices, args[0], args[1], bool((args + (False,))[2]))
        given = list_values(args, kwargs)
        simulated = [value for value in given if is_on_sim(value)]
        stream = devices.stream(find_device(devices, func, given, simulated))
        check_places(called, args, given, simulated)
        if called.launches:
            launch(devices, stream, called, args, kwargs)
        raw_args = tuple(map(to_cpu, args))
        raw_kwargs = {key: to_cpu(value) for key, value in kwargs.items()}
        raw = compute(devices, stream, called, raw_args, raw_kwargs)
        if called.is_waited_for:
            devices.counts.update(("synchronisations", "copies to the host"))
            devices.host.join(stream.clock)
        return wrap_results(raw, simulated, stream, called)


def list_values(args: tuple, kwargs: dict) -> list:
    """Return an operation's arguments, and the members of those that are lists."""
    values: list = []
    for value in (*args, *kwargs.values()):
        values.extend(value if isinstance(value, (list, tuple)) else (value,))
    return values


def find_device(devices: SimDevices, func: Any, given: list, simulated: list) -> torch.device:
    """Return the one device of all simulated tensors, or the device that is asked for.

    Raises:
        RuntimeError: there are two.
    """
    if simulated:
        first, *others = (value.allocation.memory.device for value in simulated)
        if any(other is not first for other in others):
            found = sorted({str(device) for device in (first, *others)})
            raise RuntimeError(f"{ELSEWHERE}, but found {found}: {func}")
        return first
    asked = [value for value in given if isinstance(value, torch.device) and value.type == "sim"]
    return devices.resolve(asked[0] if asked else None)


def check_places(called: Operation, args: tuple, given: list, simulated: list) -> None:
    """Refuse tensors of host memory in a kernel, except single numbers and some indices."""
    if called.is_random and any(isinstance(value, make_generator) for value in given):
        raise RuntimeError("Expected a 'sim' device type for generator but found 'cpu'")
    if not simulated:
        return
    by_host = []
    if called.name in INDEXED_BY_HOST:
        by_host = [index for index in (args[1] or ()) if isinstance(index, Tensor)]
        if not is_on_sim(args[0]):
            raise RuntimeError("indices should be either on cpu or on the same device")
        if any(not is_on_sim(index) for index in by_host):
            SimDevices.current().counts.update(("copies to the device", "synchronisations"))
    for value in given:
        if not is_on_sim(value) and isinstance(value, Tensor) and value.dim():
            if any(value is index for index in by_host):
                continue
            raise RuntimeError(f"{ELSEWHERE}, but found sim and {value.device}: {called.func}")


def to_cpu(value: Any) -> Any:
    """Return an argument as the CPU's kernel takes it."""
    if is_on_sim(value):
        return value.raw
    if isinstance(value, (list, tuple)):
        return [to_cpu(member) for member in value]
    return CPU if type(value) is torch.device and value.type == "sim" else value


def launch(devices: SimDevices, stream: SimStream, called: Operation, args: tuple, kwargs: dict):
    """Issue a kernel: check what it reads and writes, after all that its stream waits for."""
    devices.counts["launches"] += 1
    stream.issue(KERNEL_SECONDS)
    stream.run()
    what, written = called.name, called.written
    if what == "aten::_grouped_mm":
        args, kwargs = touch_groups(stream, args, kwargs), {}
    elif what == "aten::index" and (rows := args[1][0]) is not None and rows.dtype not in MASKS:
        numbers = rows.raw if is_on_sim(rows) else rows
        args = (*touch_rows(stream, args[0], numbers, what), *args[1:])
    for number, value in enumerate(args):
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if is_on_sim(leaf):
                touch(leaf, stream, writes=number in written, what=what)
    for name, value in kwargs.items():
        if is_on_sim(value):
            touch(value, stream, writes=name in written, what=what)


def touch_groups(stream: SimStream, args: tuple, kwargs: dict) -> tuple:
    """Note the matrices that a grouped product reads, of groups with rows; return what remains."""
    rows, matrices, ends = (*args, *kwargs.values())[:3]
    sizes = ends.raw.diff(prepend=ends.raw.new_zeros(1))
    touch_rows(stream, matrices, sizes.nonzero(), "aten::_grouped_mm")
    return rows, ends


def touch_rows(stream: SimStream, tensor: Any, numbers: Tensor, what: str) -> tuple:
    """Note that rows are read; return what remains to be noted."""
    if is_on_sim(tensor):
        for row in set(numbers.flatten().tolist()):
            touch(SimTensor(tensor.raw[row], tensor.allocation), stream, writes=False, what=what)
    return ()


def multiply_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply row by row: as on a GPU, a row's bits depend neither on its place nor on others."""
    products, start = rows.new_empty(len(rows), matrices.shape[-1]), 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        for row in range(start, end):
            products[row] = (rows[row : row + 1].clone() @ matrix)[0]
        start = end
    return products


def compute(devices: SimDevices, stream: SimStream, called: Operation, args: tuple, kwargs: dict):
    """Compute on the CPU, with the device's random state, and kernels that only CUDA has."""
    func = called.func
    if called.name == "aten::_grouped_mm":
        return multiply_groups(*(*args, *kwargs.values())[:3])
    if called.name == "aten::histc" and not args[0].is_floating_point():
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    if not called.is_random:
        return func(*args, **kwargs)
    index, before = stream.device.index, torch.get_rng_state()
    torch.set_rng_state(devices.random_states[index])
    try:
        return func(*args, **kwargs)
    finally:
        devices.random_states[index] = torch.get_rng_state()
        torch.set_rng_state(before)


def wrap_results(raw: Any, given: list[SimTensor], stream: SimStream, called: Operation) -> Any:
    """Return results as the device's tensors: the arguments themselves, views of them, or new."""
    if isinstance(raw, (list, tuple)):
        return type(raw)([wrap_results(value, given, stream, called) for value in raw])
    if not isinstance(raw, Tensor) or raw.device.type != "cpu":
        return raw
    for known in given:
        if known.raw is raw:
            if known.shape != raw.shape or known.stride() != raw.stride():
                raise NotImplementedError(f"{called.name} changes a tensor's shape in its place")
            return known
    if not called.is_new:
        storage = raw.untyped_storage()._cdata
        for known in given:
            if known.raw.untyped_storage()._cdata == storage:
                return SimTensor(raw, known.allocation)
    return wrap(raw, stream)


# ---- copies


def convert(devices: SimDevices, source: Tensor, kwargs: dict) -> Tensor:
    """`Tensor.to`: a new tensor of another dtype or place."""
    device = kwargs.get("device")
    device = source.device if device is None else torch.device(device)
    raw = source.raw if isinstance(source, SimTensor) else source
    non_blocking = bool(kwargs.get("non_blocking"))
    dtype = kwargs.get("dtype") or raw.dtype
    form = kwargs.get("memory_format") or torch.preserve_format
    target = torch.empty_like(raw, dtype=dtype, memory_format=form)
    if device.type == "sim":
        target = wrap(target, devices.stream(devices.resolve(device)))
    elif non_blocking:
        devices.pinned.add(target.untyped_storage().data_ptr())
    copy(devices, target, source, non_blocking)
    return target


def copy(devices: SimDevices, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """Copy between places, or within one; what the host does not wait for runs late."""
    if isinstance(target, SimTensor) and isinstance(source, SimTensor):
        copy_within(devices, target, source)
        return target
    if isinstance(target, SimTensor):
        here, there, kind = target, source, "copies to the device"
    else:
        assert isinstance(source, SimTensor)
        here, there, kind = source, target, "copies to the host"
    devices.counts[kind] += 1
    stream = devices.stream(here.device)
    stream.issue(COPY_SECONDS + SECONDS_PER_BYTE * here.numel() * here.itemsize)
    touch(here, stream, writes=here is target, what="copy")
    raw_target, raw_source = (here.raw, there) if here is target else (there, here.raw)
    if non_blocking and is_pinned(there) and here.dtype == there.dtype:
        spoil(raw_target)
        stream.put(lambda: late_copy(raw_target, raw_source))
    else:
        stream.run()
        raw_target.copy_(raw_source)
        devices.counts["synchronisations"] += 1
        devices.host.join(stream.clock)
    return target


def copy_within(devices: SimDevices, target: SimTensor, source: SimTensor) -> None:
    here, there = devices.stream(source.device), devices.stream(target.device)
    if here is not there:  # between devices, the current streams of both wait for each other
        here.wait_stream(there)
        there.wait_stream(here)
    devices.counts["launches"] += 1
    here.issue()
    here.run()
    touch(source, here, writes=False, what="copy")
    touch(target, here, writes=True, what="copy")
    target.raw.copy_(source.raw)
    if here is not there:
        there.wait_stream(here)


def late_copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def spoil(target: Tensor) -> None:
    if target.is_contiguous():
        target.detach().reshape(-1).view(torch.uint8).fill_(SPOILED)
    elif target.is_floating_point():
        target.fill_(float("nan"))
    else:
        target.fill_(SPOILED)


# ---- random numbers


class SimGenerator:
    """`torch.Generator` of a simulated device, for its state."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if not is_sim(device):
            return make_generator(device)
        generator = object.__new__(cls)
        generator._state = make_state(0)
        return generator

    def manual_seed(self, seed: int) -> SimGenerator:
        self._state = make_state(seed)
        return self

    def get_state(self) -> Tensor:
        return self._state.clone()


make_generator: type[torch.Generator] = torch.Generator
