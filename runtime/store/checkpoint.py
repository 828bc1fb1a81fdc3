"""Reads experts in place from the checkpoint's own safetensors files."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.config import PageCache
from runtime.store.base import READERS, ExpertStore, as_memoryview
from runtime.store.conversion import ExpertConversion
from runtime.store.files import FileRange, FileReader
from runtime.store.integer_tensor import IntegerTensor
from runtime.store.layout import EncodedParameter, SlotLayout, build_slot_layout
from runtime.store.tensor_index import StoredTensor
from runtime.store.weight_plan import WeightPlan


class CheckpointStore(ExpertStore):
    """Reads chunks of experts from a checkpoint into slots. Thread-safe.

    Args:
        banks: weight plans of each layer with routed experts, bottom first.
        decodes: quantised parameters are decoded while they are read; off: slots hold them as the
            checkpoint does, where that takes fewer bytes, and they are decoded at each use.
    """

    layouts: list[SlotLayout]

    def __init__(
        self,
        model: PreTrainedModel,
        banks: Sequence[dict[str, WeightPlan]],
        *,
        page_cache: PageCache = PageCache.BYPASS,
        decodes: bool = False,
    ):
        self._banks = banks
        self._conversions = [
            {name: ExpertConversion(model, plan) for name, plan in bank.items()} for bank in banks
        ]
        self._measured: dict[tuple[object, ...], int] = {}
        self.layouts = [
            build_slot_layout(bank, {} if decodes else self._find_encoded(layer))
            for layer, bank in enumerate(banks)
        ]
        self._files = FileReader(page_cache=page_cache)
        self._known_places: dict[tuple[int, str, int], list[StoredTensor]] = {}
        self._converting = threading.Lock()
        self.experts_per_layer = [
            max(plan.parameter.num_experts for plan in bank.values()) for bank in banks
        ]
        self.scratch_bytes = self._measure_scratch()

    def _find_encoded(self, layer: int) -> dict[str, EncodedParameter]:
        """Return the parameters that a slot holds as the checkpoint has them."""
        encoded = {}
        for name, plan in self._banks[layer].items():
            if not plan.is_compressed:
                continue
            conversion, extents = self._conversions[layer][name], plan.extents(0)
            sizes = _conversion_key(plan, extents)
            if sizes not in self._measured:
                self._measured[sizes] = conversion.measure_decoding()
            encoded[name] = EncodedParameter(
                tuple((extent.shape, extent.dtype) for extent in extents),
                conversion.decode,
                self._measured[sizes],
            )
        return encoded

    def _measure_scratch(self) -> int:
        """One thread converts at a time; the others may have read their input already."""
        measured: dict[tuple[object, ...], int] = {}
        for layer, (bank, layout) in enumerate(zip(self._banks, self.layouts, strict=True)):
            for piece in (piece for chunk in layout.chunks for piece in chunk):
                if piece.parameter in layout.encoded:
                    continue
                plan, conversion = bank[piece.parameter], self._conversions[layer][piece.parameter]
                for extents in plan.kinds:
                    if piece.source is not None:
                        extent = extents[piece.source]
                        if isinstance(extent, IntegerTensor):
                            measured[extent.kind] = READERS * extent.measure_loading()
                        elif extent.dtype != plan.parameter.dtype:
                            measured[extent.kind] = READERS * extent.num_bytes
                        continue
                    key = _conversion_key(plan, extents)
                    if key not in measured:
                        waiting = sum(
                            (READERS - 1) * extent.num_bytes
                            if not isinstance(extent, IntegerTensor)
                            else READERS * extent.measure_loading()
                            for extent in extents
                        )
                        measured[key] = waiting + conversion.measure_bytes(extents)
        return max(measured.values(), default=0)

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        """Fills the chunks' parts of `slot`, uint8, at least `layouts[layer].num_bytes` long.

        Raises:
            TransferError: short read or I/O error, with the file, the offset and the tensor.
        """
        layout = self.layouts[layer]
        for chunk in chunks:
            for piece in layout.chunks[chunk]:
                plan = self._banks[layer][piece.parameter]
                target = slot[piece.offset : piece.offset + piece.num_bytes]
                places = self._places(layer, piece.parameter, expert)
                if piece.source is None:
                    # Read before the lock is taken: a read that hangs must not stop the others.
                    tensors = [self._tensor(extent) for extent in places]
                    with self._converting:
                        result = self._conversions[layer][piece.parameter].convert(tensors)
                        target.view(plan.parameter.dtype).copy_(result.reshape(-1))
                        del result
                    continue
                extent = places[piece.source]
                if self._has_bytes(layer, piece.parameter, extent):
                    self._pread(extent, as_memoryview(target))
                else:
                    source = self._tensor(extent).view(-1)
                    target.view(plan.parameter.dtype).copy_(source)

    def _has_bytes(self, layer: int, parameter: str, extent: StoredTensor) -> bool:
        """Return whether the slot holds the part as the file does."""
        if parameter in self.layouts[layer].encoded:
            return True
        dtype = self._banks[layer][parameter].parameter.dtype
        return extent.dtype == dtype and not isinstance(extent, IntegerTensor)

    def extents(self, layer: int, expert: int) -> list[FileRange] | None:
        ranges = []
        for piece in (piece for chunk in self.layouts[layer].chunks for piece in chunk):
            if piece.source is None:
                return None
            extent = self._banks[layer][piece.parameter].extents(expert)[piece.source]
            if not self._has_bytes(layer, piece.parameter, extent):
                return None
            ranges.append(FileRange(extent.file, extent.offset))
        return ranges

    def _places(self, layer: int, parameter: str, expert: int) -> list[StoredTensor]:
        """Return where the expert's part is, from a cache: lookups would delay the link."""
        key = layer, parameter, expert
        known = self._known_places.get(key)
        if known is None:
            known = self._known_places[key] = self._banks[layer][parameter].extents(expert)
        return known

    def _tensor(self, extent: StoredTensor) -> Tensor:
        if isinstance(extent, IntegerTensor):
            return extent.load(self._files)
        tensor = torch.empty(extent.shape, dtype=extent.dtype)
        self._pread(extent, as_memoryview(tensor))
        return tensor

    def _pread(self, extent: StoredTensor, target: memoryview) -> None:
        self._files.read(extent.file, extent.offset, target, what=extent.key)


def _conversion_key(plan: WeightPlan, extents: Sequence[StoredTensor]) -> tuple[object, ...]:
    """Layers are mostly alike, and what a conversion takes depends on sizes only."""
    return (*plan.operations, *(extent.kind for extent in extents), plan.parameter.dtype)
