"""Experts that are read in place, from the files of a checkpoint: safetensors or GGUF.

A plan says which tensors an expert's parameters are made of (`runtime.store.weight_plan`). Each is
a part of a slot, which is read, cast or converted. Quantised weights stay in slots as the
checkpoint has them where that takes fewer bytes, rows and integers as blocks of a GGUF type; or all
are decoded while they are read.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.store.base import READERS, ExpertStore
from runtime.store.conversion import ExpertConversion
from runtime.store.files import FileRange, FileReader
from runtime.store.layout import Decoder, ExpertLayout, Part, Piece, group_chunks, lay_out
from runtime.store.packed.coding import RAW, STORED, Coding
from runtime.store.tensor_index import StoredTensor
from runtime.store.weight_plan import FusedParameter, WeightPlan


@dataclass(frozen=True)
class ConvertedTensor:
    """A parameter of one expert that Transformers' operations make of its tensors."""

    conversion: ExpertConversion
    converting: threading.Lock
    """One thread converts at a time."""
    expert: int

    def fill(self, files: FileReader, target: Tensor, _coding: Coding, dtype: torch.dtype) -> None:
        # Read before the lock is taken: a read that hangs must not stop the others.
        tensors = [tensor.load(files) for tensor in self.conversion.plan.extents(self.expert)]
        with self.converting:
            result = self.conversion.convert(tensors)
            target.view(dtype).copy_(result.reshape(-1))
            del result


@dataclass(frozen=True)
class PartSource(Piece):
    """The tensors that fill a part of a slot, of every expert of a layer."""

    find: Callable[[int], StoredTensor | ConvertedTensor]
    """Returns an expert's."""
    scratch_bytes: int
    """Memory that `READERS` reads at a time take in addition to the slots."""


class CheckpointStore(ExpertStore):
    """Reads chunks of experts from a checkpoint into slots. Thread-safe.

    Args:
        banks: weight plans of each layer with routed experts, bottom first.
        decodes: quantised parameters are decoded while they are read; off: slots hold them as the
            checkpoint does, or as blocks of a GGUF type.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        banks: Sequence[Mapping[str, WeightPlan]],
        files: FileReader,
        *,
        decodes: bool = False,
    ):
        self.files = files
        plans = chain.from_iterable(bank.values() for bank in banks)
        files.remember(tensor.file for plan in plans for tensor in plan.tensors())
        planner = _Planner(model, decodes=decodes, blocks=not decodes and has_blocks(banks))
        self.layouts = layouts = list[ExpertLayout]()
        self.experts_per_layer = experts_per_layer = list[int]()
        self._chunks: list[list[list[tuple[Part, PartSource]]]] = []
        self.scratch_bytes = 0
        for bank in banks:
            sources, decoders = planner.plan_layer(bank)
            parameters = [plan.parameter for plan in bank.values()]
            laid = _lay_out_apart(parameters, sources)
            layouts.append(replace(laid, decoders=decoders))
            following = iter(sources)
            self._chunks.append(
                [[(part, next(following)) for part in chunk] for chunk in laid.chunks]
            )
            experts_per_layer.append(max(parameter.num_experts for parameter in parameters))
            self.scratch_bytes = max(self.scratch_bytes, *(one.scratch_bytes for one in sources))

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        dtypes = self.layouts[layer].dtypes
        for part, source in chain.from_iterable(self._chunks[layer][i] for i in chunks):
            target, dtype = slot[part.offset : part.end], dtypes[part.parameter]
            source.find(expert).fill(self.files, target, part.coding, dtype)

    def extents(self, layer: int, expert: int) -> list[FileRange] | None:
        places = []
        for part, source in chain.from_iterable(self._chunks[layer]):
            tensor, dtype = source.find(expert), self.layouts[layer].dtypes[part.parameter]
            if not (isinstance(tensor, StoredTensor) and tensor.is_stored_as(part.coding, dtype)):
                return None
            places.append(FileRange(tensor.file, tensor.offset))
        return places


def has_blocks(banks: Sequence[Mapping[str, WeightPlan]]) -> bool:
    """Return whether the experts can be served in blocks of a GGUF type, as some are stored."""
    plans = [plan for bank in banks for plan in bank.values()]
    return all(plan.is_plain for plan in plans) and any(
        extent.choose_coding() != RAW
        for plan in plans
        for extents in plan.kinds
        for extent in extents
    )


def _keep(tensors: list[StoredTensor]) -> Coding:
    return Coding(STORED, shape=tensors[0].shape, dtype=tensors[0].dtype)


def _find_tensor(plan: WeightPlan, source: int, expert: int) -> StoredTensor:
    return plan.extents(expert)[source]


class _Planner:
    """Plans layers; they are mostly alike, so that what reads take is measured once a kind."""

    def __init__(self, model: PreTrainedModel, *, decodes: bool, blocks: bool):
        self._model = model
        self._decodes, self._blocks = decodes, blocks
        self._converting = threading.Lock()
        self._measured: dict[object, int] = {}

    def plan_layer(
        self, bank: Mapping[str, WeightPlan]
    ) -> tuple[list[PartSource], dict[str, Decoder]]:
        """Return what fills a slot, in order, and what decodes parameters that stay as stored."""
        sources: list[PartSource] = []
        decoders: dict[str, Decoder] = {}
        for name, plan in bank.items():
            conversion = ExpertConversion(self._model, plan)
            if plan.is_plain:
                sources += self._plan_tensors(plan, self._choose_coding)
            elif plan.is_compressed and not self._decodes:
                size = self._measure((conversion.key, "decode"), conversion.measure_decoding)
                decoders[name] = Decoder(conversion.decode, size)
                sources += self._plan_tensors(plan, _keep)
            else:
                sources.append(self._plan_conversion(conversion))
        return sources, decoders

    def _plan_tensors(
        self, plan: WeightPlan, choose: Callable[[list[StoredTensor]], Coding]
    ) -> list[PartSource]:
        """Plan a part for each of the expert's tensors.

        Args:
            choose: chooses the coding in a slot of one tensor of each kind of expert.
        """
        planned: list[PartSource] = []
        first = 0
        for source, extent in enumerate(plan.extents(0)):
            tensors = [extents[source] for extents in plan.kinds]
            coding = choose(tensors)
            size = math.prod(extent.shape)
            scratch = max(self._measure_read(one, coding, plan) for one in tensors)
            # Remembered by expert: lookups would delay the link.
            find = cache(partial(_find_tensor, plan, source))
            planned.append(PartSource(plan.parameter.name, first, size, coding, find, scratch))
            first += size
        return planned

    def _choose_coding(self, tensors: list[StoredTensor]) -> Coding:
        codings = {one.choose_coding() if self._blocks else RAW for one in tensors}
        # A slot is for any expert: where one is left unquantised, all are dequantised.
        return codings.pop() if len(codings) == 1 else RAW

    def _plan_conversion(self, conversion: ExpertConversion) -> PartSource:
        parameter = conversion.plan.parameter
        size = math.prod(parameter.shape[1:])
        find = partial(ConvertedTensor, conversion, self._converting)
        scratch = self._measure(conversion.key, conversion.measure_reads)
        return PartSource(parameter.name, 0, size, RAW, find, scratch)

    def _measure_read(self, tensor: StoredTensor, coding: Coding, plan: WeightPlan) -> int:
        if tensor.is_stored_as(coding, plan.parameter.dtype):
            return 0
        kind = coding, tensor.kind
        return self._measure(kind, lambda: READERS * tensor.measure_filling(coding))

    def _measure(self, kind: object, measure: Callable[[], int]) -> int:
        if kind not in self._measured:
            self._measured[kind] = measure()
        return self._measured[kind]


def assume_layout(parameters: Sequence[FusedParameter]) -> ExpertLayout:
    """Return the layout of experts whose checkpoint is not there: a chunk for each parameter.

    Parameters of gate and up are two chunks, as most checkpoints store them.
    """
    pieces = []
    for parameter in parameters:
        shape = parameter.shape[1:]
        num_parts = 2 if "gate_up" in parameter.name and len(shape) > 1 and not shape[0] % 2 else 1
        count = math.prod(shape) // num_parts
        pieces += [Piece(parameter.name, i * count, count, RAW) for i in range(num_parts)]
    return _lay_out_apart(parameters, pieces)


def _lay_out_apart(parameters: Sequence[FusedParameter], pieces: Sequence[Piece]) -> ExpertLayout:
    """Return the layout of pieces that are read one by one, without a record."""
    shapes = {parameter.name: parameter.shape[1:] for parameter in parameters}
    dtypes = {parameter.name: parameter.dtype for parameter in parameters}
    return lay_out(shapes, dtypes, group_chunks(pieces, shapes), block=1)
