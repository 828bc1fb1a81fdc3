"""Dense weights of layers, read ahead of their computation through a few buffers.

Klotski, section 6.1, places and moves attention and gates like experts. Section 6.2: "for
non-expert tensors [...] we prefetch the tensor during the computations of the previous layer":
a router's weights while its layer's attention computes, the next layer's attention while experts
compute (algorithm 1, lines 3-4).
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runtime.accelerator import Event, open_accelerator
from runtime.hf.forward_pass import ForwardReplacement
from runtime.hf.layers import MoeLayer
from runtime.store.base import allocate_aligned
from runtime.store.dense_source import DenseExtent, DenseStore, read_extents
from runtime.store.files import ALIGNMENT, align

NUM_BUFFERS = 2
"""Buffers of attention weights, and of routers: one computes while the next is read."""


@dataclass(eq=False)
class DenseBuffer:
    """Memory for one part's weights."""

    memory: Tensor
    part: "DensePart | None" = None
    """The part whose bytes are in it, or are being read into it."""
    fence: Event | None = None
    """The last computation with it that was issued."""


@dataclass(eq=False)
class DensePart:
    """Weights that are read together: a block's without its routers, or a router's."""

    module: nn.Module
    """The weights are needed while its forward pass runs."""
    parameters: dict[str, nn.Parameter]
    """By name in the model."""
    buffer: DenseBuffer | None = None
    arrived: "Future[None] | None" = None
    is_bound: bool = False
    """The parameters are the buffer's memory."""
    num_users: int = 0
    """Forward passes of the module that run now, some of them suspended."""
    extents: list[DenseExtent] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Some modules cast their parameters in their forward passes: kept as they were loaded.
        self.layouts = [(p.shape, p.dtype, p.nbytes) for p in self.parameters.values()]
        self.num_bytes = sum(align(num_bytes) for _, _, num_bytes in self.layouts)


@dataclass(frozen=True)
class DenseLayer:
    """Dense weights of one block, in the order in which they are needed."""

    attention: DensePart
    """All but routers and experts: attention, norms, shared experts."""
    gates: list[DensePart]
    layers: list[int]
    """The block's layers with routed experts."""


def find_dense_layers(
    model: nn.Module, layers: Iterable[MoeLayer], *, with_gates: bool = True
) -> list[DenseLayer]:
    """Return the dense weights of the blocks with routed experts.

    Weights that several modules share stay where they are, and so do those outside of such blocks.

    Args:
        model: the loaded model.
        layers: its layers with routed experts.
        with_gates: routers are separate parts; off: parts of their blocks, for models that compute
            with a router's weights without calling it.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    num_owners = Counter(id(parameter) for _, parameter in named)
    names = {id(parameter): name for name, parameter in named}

    def own(module: nn.Module, without: set[int]) -> dict[str, nn.Parameter]:
        return {
            names[id(parameter)]: parameter
            for parameter in module.parameters()
            if num_owners[id(parameter)] == 1 and id(parameter) not in without
        }

    found: dict[int, DenseLayer] = {}
    by_block: dict[int, list[MoeLayer]] = {}
    for layer in layers:
        by_block.setdefault(id(layer.block), []).append(layer)
    for of_block in by_block.values():
        block = of_block[0].block
        is_apart = [layer.router not in (layer.parent, block) for layer in of_block]
        gates = [
            DensePart(layer.router, own(layer.router, set()))
            for layer, apart in zip(of_block, is_apart, strict=True)
            if with_gates and apart
        ]
        taken = {id(parameter) for gate in gates for parameter in gate.parameters.values()}
        attention = DensePart(block, own(block, taken))
        found[id(block)] = DenseLayer(attention, gates, [layer.index for layer in of_block])
    return list(found.values())


def count_dense_bytes(layers: Sequence[DenseLayer]) -> int:
    """Return the bytes of all dense weights of the layers."""
    return sum(part.num_bytes for layer in layers for part in (layer.attention, *layer.gates))


def count_buffer_bytes(layers: Sequence[DenseLayer]) -> int:
    """Return the bytes of the buffers that `DenseStream` allocates."""
    sizes = _largest_bytes(layers)
    return sum(NUM_BUFFERS * (size + ALIGNMENT) for size in sizes if size)


def _largest_bytes(layers: Sequence[DenseLayer]) -> tuple[int, int]:
    attention = max(layer.attention.num_bytes for layer in layers)
    gates = [gate.num_bytes for layer in layers for gate in layer.gates]
    return attention, max(gates, default=0)


class DenseStream:
    """Moves the dense weights of layers out of memory, and reads them when they are needed.

    A module's weights are bitwise the same, at addresses with the same alignment, while its
    forward pass runs, so results are, too. At all other times its parameters are empty.

    Thread-safe. If more modules run at once than there are buffers, more are allocated.

    Args:
        layers: of `find_dense_layers`, in the order in which they compute.
        store: keeps the weights.
        device: computes.

    Raises:
        TransferError: the weights cannot be written or read; then all are in memory as before.
    """

    def __init__(self, layers: Sequence[DenseLayer], store: DenseStore, device: torch.device):
        self._layers = layers
        self._store = store
        self._device = device
        self._accelerator = open_accelerator(device)
        self._lock = threading.RLock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="moecast dense")
        self._after: dict[int, DensePart] = {}
        """The attention part that computes after each layer's experts."""
        self._gates: dict[DensePart, list[DensePart]] = {}
        self._buffers: dict[DensePart, list[DenseBuffer]] = {}
        """The buffers that a part may use."""
        self.num_read = 0
        self.bytes_read = 0
        self._replaced: list[ForwardReplacement] = []
        try:
            self._take_over(layers)
        except BaseException:
            self.close()
            raise

    def _take_over(self, layers: Sequence[DenseLayer]) -> None:
        attention_bytes, gate_bytes = _largest_bytes(layers)
        attention_buffers = self._allocate(attention_bytes)
        gate_buffers = self._allocate(gate_bytes)
        for number, layer in enumerate(layers):
            following = layers[(number + 1) % len(layers)].attention
            self._after.update(dict.fromkeys(layer.layers, following))
            self._gates[layer.attention] = layer.gates
            for part, buffers in (
                (layer.attention, attention_buffers),
                *((gate, gate_buffers) for gate in layer.gates),
            ):
                if part.parameters:
                    self._move_out(part)
                    self._replaced.append(self._wrap(part))
                self._buffers[part] = buffers

    def _allocate(self, num_bytes: int) -> list[DenseBuffer]:
        return [self._make_buffer(num_bytes) for _ in range(NUM_BUFFERS if num_bytes else 0)]

    def _make_buffer(self, num_bytes: int) -> DenseBuffer:
        return DenseBuffer(allocate_aligned(num_bytes, ALIGNMENT, device=self._device))

    def _move_out(self, part: DensePart) -> None:
        tensors = {name: parameter.data for name, parameter in part.parameters.items()}
        part.extents = self._store.place_all(tensors)
        self._unbind(part)

    def _wrap(self, part: DensePart) -> ForwardReplacement:
        forward = part.module.forward

        def with_weights(*args: Any, **kwargs: Any) -> Any:
            self._acquire(part)
            try:
                return forward(*args, **kwargs)
            finally:
                self._release(part)

        return ForwardReplacement(part.module, with_weights)

    # ---- forward passes

    def _acquire(self, part: DensePart) -> None:
        with self._lock:
            part.num_users += 1
            try:
                self._start_read(part, must=True)
                for gate in self._gates.get(part, ()):
                    self._start_read(gate, must=False)
                assert part.arrived is not None
                part.arrived.result()
            except BaseException:
                part.num_users -= 1
                self._drop(part)
                raise
            if not part.is_bound:
                self._bind(part)

    def _release(self, part: DensePart) -> None:
        with self._lock:
            part.num_users -= 1
            if part.num_users == 0 and self._accelerator is not None and part.buffer is not None:
                part.buffer.fence = self._accelerator.make_event()
                part.buffer.fence.record(self._accelerator.current_stream())

    def on_routed(self, layer: int) -> None:
        """Read the weights that are needed next: the routers of a layer have all run."""
        with self._lock:
            self._start_read(self._after[layer], must=False)

    # ---- reads

    def _start_read(self, part: DensePart, *, must: bool) -> None:
        """Start to read a part, unless it is in a buffer or, if it need not, none is free."""
        if part.buffer is not None or not part.parameters:
            return
        buffers = self._buffers[part]
        free = next((buffer for buffer in buffers if not _is_used(buffer)), None)
        if free is None:
            if not must:
                return
            free = self._make_buffer(len(buffers[0].memory))
            buffers.append(free)
        # The least recently read one is the next to be overwritten.
        buffers.remove(free)
        buffers.append(free)
        if free.part is not None:
            self._drop(free.part)
        free.part, part.buffer = part, free
        part.arrived = self._reader.submit(self._read, part, free)
        self.num_read += 1
        self.bytes_read += sum(extent.stored_bytes for extent in part.extents)

    def _read(self, part: DensePart, buffer: DenseBuffer) -> None:
        if buffer.fence is not None:
            buffer.fence.synchronize()
        read_extents(part.extents, buffer.memory)

    def _bind(self, part: DensePart) -> None:
        """Let the parameters be the buffer's memory."""
        assert part.buffer is not None
        part.is_bound = True
        start = 0
        for parameter, layout in zip(part.parameters.values(), part.layouts, strict=True):
            shape, dtype, num_bytes = layout
            parameter.data = part.buffer.memory[start : start + num_bytes].view(dtype).view(shape)
            start += align(num_bytes)

    def _unbind(self, part: DensePart) -> None:
        part.is_bound = False
        for parameter in part.parameters.values():
            parameter.data = parameter.data.new_empty(0)

    def _drop(self, part: DensePart) -> None:
        """Take a part that no forward pass uses out of its buffer."""
        if part.num_users or part.buffer is None:
            return
        if part.arrived is not None:
            part.arrived.exception()  # wait: the buffer is written to next
        self._unbind(part)
        part.buffer.part = part.buffer = part.arrived = None

    def close(self, *, restore: bool = True) -> None:
        """Give the modules their own forward passes back; no forward pass may be running.

        Args:
            restore: read all weights back into memory; off: the model cannot compute any more.
        """
        with self._lock:
            for replaced in self._replaced:
                replaced.remove()
            self._replaced.clear()
            for part in self._buffers:
                self._drop(part)
            if restore:
                for part in self._buffers:
                    part.buffer = self._make_buffer(part.num_bytes)
                    self._read(part, part.buffer)
                    self._bind(part)
            self._buffers.clear()
        self._reader.shutdown()
        self._store.close()


def _is_used(buffer: DenseBuffer) -> bool:
    return buffer.part is not None and buffer.part.num_users > 0
