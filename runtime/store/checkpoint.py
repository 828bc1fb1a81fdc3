"""Reads experts in place from the checkpoint's own safetensors files."""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from runtime.config import PageCache
from runtime.errors import CheckpointError
from runtime.store.base import READERS, ExpertStore, as_memoryview
from runtime.store.files import FileReader
from runtime.store.layout import SlotLayout, build_slot_layout
from runtime.store.tensor_index import StoredTensor
from runtime.store.weight_plan import WeightPlan


class _OneExpertModel:
    """Presents a fused parameter with a single expert to Transformers' conversion operations."""

    def __init__(self, model: PreTrainedModel, plan: WeightPlan):
        self._model = model
        self._plan = plan

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def get_parameter_or_buffer(self, name: str) -> Tensor:
        parameter = self._plan.parameter
        if name == parameter.target:
            return torch.empty((1, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
        return self._model.get_parameter_or_buffer(name)

    get_parameter = get_parameter_or_buffer


class CheckpointStore(ExpertStore):
    """Reads chunks of experts from a checkpoint into slots. Thread-safe.

    Args:
        banks: weight plans of each layer with routed experts, bottom first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        banks: Sequence[dict[str, WeightPlan]],
        *,
        page_cache: PageCache = PageCache.BYPASS,
    ):
        self._model = model
        self._banks = banks
        self.layouts: list[SlotLayout] = [build_slot_layout(bank) for bank in banks]
        self._files = FileReader(page_cache=page_cache)
        self._known_places: dict[tuple[int, str, int], list[StoredTensor]] = {}
        self._converting = threading.Lock()
        self.experts_per_layer = [
            max(plan.parameter.num_experts for plan in bank.values()) for bank in banks
        ]
        self.scratch_bytes = self._measure_scratch()

    def _measure_scratch(self) -> int:
        """One thread converts at a time; the others may have read their input already."""
        measured: dict[tuple[object, ...], int] = {}
        for bank, layout in zip(self._banks, self.layouts, strict=True):
            for piece in (piece for chunk in layout.chunks for piece in chunk):
                plan = bank[piece.parameter]
                extents = plan.extents(0)
                if piece.source is not None:
                    extent = extents[piece.source]
                    if extent.dtype != plan.parameter.dtype:
                        measured[extent.shape, extent.dtype] = READERS * extent.num_bytes
                    continue
                # Layers are mostly alike, and what a conversion takes depends on sizes only.
                sizes = tuple((extent.shape, extent.dtype) for extent in extents)
                key = (*plan.operations, *sizes, plan.parameter.dtype)
                if key not in measured:
                    waiting = (READERS - 1) * sum(extent.num_bytes for extent in extents)
                    measured[key] = waiting + self._conversion_bytes(plan)
        return max(measured.values(), default=0)

    def _conversion_bytes(self, plan: WeightPlan) -> int:
        def zeros(extent: StoredTensor) -> Tensor:
            raw = torch.zeros(extent.num_bytes, dtype=torch.uint8)  # no dtype's own zeros needed
            return raw.view(extent.dtype).view(extent.shape)

        def convert() -> None:
            self._converted(plan, [zeros(extent) for extent in plan.extents(0)])

        try:
            return measure_peak_bytes(convert)
        except (ValueError, RuntimeError, IndexError, AssertionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{plan.parameter.target}: the library's {', '.join(plan.operations)} cannot "
                f"read this checkpoint's {', '.join(plan.sources)}: {error}"
            ) from error

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        """Fills the chunks' parts of `slot`, uint8, at least `layouts[layer].num_bytes` long.

        Raises:
            TransferError: short read or I/O error, with the file, the offset and the tensor.
        """
        for chunk in chunks:
            for piece in self.layouts[layer].chunks[chunk]:
                plan = self._banks[layer][piece.parameter]
                target = slot[piece.offset : piece.offset + piece.num_bytes]
                places = self._places(layer, piece.parameter, expert)
                if piece.source is None:
                    # Read before the lock is taken: a read that hangs must not stop the others.
                    tensors = [self._tensor(extent) for extent in places]
                    with self._converting:
                        result = self._converted(plan, tensors)
                        target.view(plan.parameter.dtype).copy_(result.reshape(-1))
                        del result
                    continue
                extent = places[piece.source]
                if extent.dtype == plan.parameter.dtype:
                    self._pread(extent, as_memoryview(target))
                else:
                    source = self._tensor(extent).view(-1)
                    target.view(plan.parameter.dtype).copy_(source)

    def _places(self, layer: int, parameter: str, expert: int) -> list[StoredTensor]:
        """Return where the expert's part is, from a cache: lookups would delay the link."""
        key = layer, parameter, expert
        known = self._known_places.get(key)
        if known is None:
            known = self._known_places[key] = self._banks[layer][parameter].extents(expert)
        return known

    def _tensor(self, extent: StoredTensor) -> Tensor:
        tensor = torch.empty(extent.shape, dtype=extent.dtype)
        self._pread(extent, as_memoryview(tensor))
        return tensor

    @torch.no_grad()
    def _converted(self, plan: WeightPlan, tensors: list[Tensor]) -> Tensor:
        """Through the library's own operations, on an input with one expert.

        Takes the tensors out of their list.

        Cast first where the library casts first; quantised storage never before the library's
        dequantisation has seen it.

        Raises:
            CheckpointError: the operations make something else than the parameter.
        """
        converter, parameter = plan.converter, plan.parameter
        assert converter is not None
        values: dict[str, Any] = {}
        for pattern in plan.sources:
            tensor = tensors.pop(0)
            if plan.casts_first:
                tensor = tensor.to(parameter.dtype)
            # An operation on a fused tensor is given one with a single expert.
            values[pattern] = [tensor if plan.is_per_expert else tensor.unsqueeze(0)]
            del tensor
        for operation in converter.operations:
            values = operation.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=parameter.target,
                model=_OneExpertModel(self._model, plan),
                config=self._model.config,
                missing_keys=None,
            )
        result = next(iter(values.values()))
        result = result[0] if isinstance(result, list) else result
        if result.numel() != math.prod(parameter.shape[1:]):
            raise CheckpointError(
                f"{parameter.target}: the library's {', '.join(plan.operations)} make "
                f"{tuple(result.shape)} of one expert, not {parameter.shape[1:]}"
            )
        return result

    def _pread(self, extent: StoredTensor, target: memoryview) -> None:
        self._files.read(extent.file, extent.offset, target, what=extent.key)


class _Live(TorchDispatchMode):
    """Counts bytes of live tensors that are created within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            if not tensor.is_meta:
                self._count(tensor.untyped_storage())
        within = _bytes_within(function, args)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes + within)
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._live_bytes += size

        def freed(_: object) -> None:
            self._live_bytes -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, freed)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes_within(function: Any, args: tuple) -> int:
    """Memory of kernels: indexing converts 32-bit indices to 64-bit ones."""
    if function is not torch.ops.aten.index.Tensor:
        return 0
    return sum(8 * t.numel() for t in _tensors(args[1]) if t.dtype == torch.int32)


def measure_peak_bytes(computation: Callable[[], object]) -> int:
    """Runs the computation; the most bytes that its tensors took at one moment.

    Each allocation counts in full, from the operation that makes it until the last tensor that
    shows it is gone. The test compares it with the allocator's own account.
    """
    live = _Live()
    with live:
        computation()
    return live.peak_bytes
