"""Experts that are read in place, from the files of a checkpoint: safetensors or GGUF.

A plan says which tensors an expert's parameters are made of (`runtime.store.weight_plan`). Each is
a part of a slot, which is read, cast or converted. Quantised weights stay in slots as the
checkpoint has them where that takes fewer bytes, rows and integers as blocks of a GGUF type; or all
are decoded while they are read.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True, kw_only=True)
class PartSource(Piece, ABC):
    """Source that fills a part of a slot, for every expert of a layer."""

    files: FileReader
    scratch_bytes: int = 0
    """Memory that `READERS` reads at a time take in addition to the slots."""

    @abstractmethod
    def read(self, expert: int, target: Tensor) -> None:
        """Fill the part's bytes in a slot, uint8. Thread-safe.

        Raises:
            TransferError: the bytes did not arrive, or are damaged.
        """

    def place(self, expert: int) -> FileRange | None:  # noqa: ARG002
        """Return where a file has these bytes as they are; None: `read` makes them."""
        return None


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
        self._files = files
        planner = _Planner(model, files, decodes=decodes, blocks=not decodes and has_blocks(banks))
        self.layouts = layouts = list[ExpertLayout]()
        self.experts_per_layer = experts_per_layer = list[int]()
        self._chunks: list[list[list[tuple[Part, PartSource]]]] = []
        self.scratch_bytes = 0
        for bank in banks:
            sources, decoders = planner.plan_layer(bank)
            parameters = [plan.parameter for plan in bank.values()]
            shapes = {parameter.name: parameter.shape[1:] for parameter in parameters}
            dtypes = {parameter.name: parameter.dtype for parameter in parameters}
            laid = lay_out(shapes, dtypes, group_chunks(sources, shapes), block=1)
            layouts.append(replace(laid, decoders=decoders))
            following = iter(sources)
            self._chunks.append(
                [[(part, next(following)) for part in chunk] for chunk in laid.chunks]
            )
            experts_per_layer.append(max(parameter.num_experts for parameter in parameters))
            self.scratch_bytes = max(self.scratch_bytes, *(one.scratch_bytes for one in sources))

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        for chunk in chunks:
            for part, source in self._chunks[layer][chunk]:
                source.read(expert, slot[part.offset : part.end])

    def extents(self, layer: int, expert: int) -> list[FileRange] | None:
        sources = [source for chunk in self._chunks[layer] for _, source in chunk]
        places = [place for source in sources if (place := source.place(expert)) is not None]
        return places if len(places) == len(sources) else None


@dataclass(frozen=True, kw_only=True)
class PlannedPart(PartSource):
    """One tensor of each expert."""

    plan: WeightPlan
    source: int
    """Index of the plan's source."""
    _known: dict[int, StoredTensor] = field(default_factory=dict)
    """Tensors by expert: lookups would delay the link."""

    def read(self, expert: int, target: Tensor) -> None:
        self._find(expert).fill(self.files, target, self.coding, self.plan.parameter.dtype)

    def place(self, expert: int) -> FileRange | None:
        tensor = self._find(expert)
        is_there = tensor.is_stored_as(self.coding, self.plan.parameter.dtype)
        return FileRange(tensor.file, tensor.offset) if is_there else None

    def _find(self, expert: int) -> StoredTensor:
        if expert not in self._known:
            self._known[expert] = self.plan.extents(expert)[self.source]
        return self._known[expert]


@dataclass(frozen=True, kw_only=True)
class ConvertedParameter(PartSource):
    """A parameter that Transformers' operations make of all its tensors, one thread at a time."""

    conversion: ExpertConversion
    converting: threading.Lock

    def read(self, expert: int, target: Tensor) -> None:
        plan = self.conversion.plan
        # Read before the lock is taken: a read that hangs must not stop the others.
        tensors = [tensor.load(self.files) for tensor in plan.extents(expert)]
        with self.converting:
            result = self.conversion.convert(tensors)
            target.view(plan.parameter.dtype).copy_(result.reshape(-1))
            del result


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


class _Planner:
    """Plans layers; they are mostly alike, so that what reads take is measured once a kind."""

    def __init__(self, model: PreTrainedModel, files: FileReader, *, decodes: bool, blocks: bool):
        self._model, self._files = model, files
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
            part = PlannedPart(
                plan.parameter.name,
                first,
                math.prod(extent.shape),
                coding,
                scratch_bytes=max(self._measure_read(one, coding, plan) for one in tensors),
                plan=plan,
                source=source,
                files=self._files,
            )
            planned.append(part)
            first += part.num_weights
        return planned

    def _choose_coding(self, tensors: list[StoredTensor]) -> Coding:
        codings = {one.choose_coding() if self._blocks else RAW for one in tensors}
        # A slot is for any expert: where one is left unquantised, all are dequantised.
        return codings.pop() if len(codings) == 1 else RAW

    def _plan_conversion(self, conversion: ExpertConversion) -> PartSource:
        parameter = conversion.plan.parameter
        return ConvertedParameter(
            parameter.name,
            0,
            math.prod(parameter.shape[1:]),
            RAW,
            scratch_bytes=self._measure(conversion.key, conversion.measure_reads),
            conversion=conversion,
            files=self._files,
            converting=self._converting,
        )

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
    shapes = {parameter.name: parameter.shape[1:] for parameter in parameters}
    dtypes: dict[str, torch.dtype] = {parameter.name: parameter.dtype for parameter in parameters}
    return lay_out(shapes, dtypes, group_chunks(pieces, shapes), block=1)
