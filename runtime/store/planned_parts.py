"""Sources of slots in a safetensors checkpoint: its tensors, read, cast or converted by plan.

Quantised weights stay in slots as the checkpoint has them where that takes fewer bytes, integers as
blocks of a GGUF type; or all are decoded while they are read.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.store.base import READERS
from runtime.store.checkpoint import CheckpointStore, LayerSources, PartSource
from runtime.store.conversion import ExpertConversion
from runtime.store.files import BLOCK, FileRange, FileReader
from runtime.store.integer_tensor import IntegerTensor
from runtime.store.layout import Decoder, ExpertLayout, Piece, group_chunks, lay_out
from runtime.store.packed.coding import RAW, STORED, Coding
from runtime.store.tensor_index import StoredTensor
from runtime.store.weight_plan import FusedParameter, WeightPlan


@dataclass(frozen=True, kw_only=True)
class PlannedPart(PartSource):
    """One tensor of each expert."""

    plan: WeightPlan
    source: int
    """Index of the plan's source."""
    _known: dict[int, StoredTensor] = field(default_factory=dict)
    """Tensors by expert: lookups would delay the link."""

    def read(self, expert: int, target: Tensor) -> None:
        tensor = self._find(expert)
        if _is_as_stored(tensor, self.coding, self.plan):
            tensor.read(self.files, target)
        elif isinstance(tensor, IntegerTensor) and self.coding != RAW:
            target.copy_(tensor.read_blocks(self.files, self.coding))
        else:
            target.view(self.plan.parameter.dtype).copy_(tensor.load(self.files).reshape(-1))

    def place(self, expert: int) -> FileRange | None:
        tensor = self._find(expert)
        if not _is_as_stored(tensor, self.coding, self.plan):
            return None
        return FileRange(tensor.file, tensor.offset)

    def _find(self, expert: int) -> StoredTensor:
        if expert not in self._known:
            self._known[expert] = self.plan.extents(expert)[self.source]
        return self._known[expert]


def _is_as_stored(tensor: StoredTensor, coding: Coding, plan: WeightPlan) -> bool:
    """Return whether a slot holds the bytes that the file has."""
    if isinstance(tensor, IntegerTensor):
        return False
    return coding != RAW or tensor.dtype == plan.parameter.dtype


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


def open_checkpoint(
    model: PreTrainedModel,
    banks: Sequence[dict[str, WeightPlan]],
    files: FileReader,
    *,
    decodes: bool = False,
) -> CheckpointStore:
    """Return the store of a checkpoint's experts.

    Args:
        banks: weight plans of each layer with routed experts, bottom first.
        decodes: quantised parameters are decoded while they are read; off: slots hold them as the
            checkpoint does, or as blocks of a GGUF type.
    """
    planner = _Planner(model, files, decodes=decodes, blocks=not decodes and has_integers(banks))
    return CheckpointStore([planner.plan_layer(bank) for bank in banks], files)


def has_integers(banks: Sequence[dict[str, WeightPlan]]) -> bool:
    """Return whether the experts can be served as integers: some are, and their rows stay rows."""
    plans = [plan for bank in banks for plan in bank.values()]
    return all(plan.is_plain for plan in plans) and any(
        isinstance(extent, IntegerTensor)
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

    def plan_layer(self, bank: dict[str, WeightPlan]) -> LayerSources:
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
        parameters = [plan.parameter for plan in bank.values()]
        return LayerSources(parameters, sources, decoders, BLOCK if self._blocks else 1)

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
        codings = {
            one.choose_coding() if self._blocks and isinstance(one, IntegerTensor) else RAW
            for one in tensors
        }
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
        if _is_as_stored(tensor, coding, plan):
            return 0

        def measure() -> int:
            if isinstance(tensor, IntegerTensor) and coding != RAW:
                return READERS * tensor.measure_blocks(coding)
            return READERS * tensor.measure_loading()

        return self._measure((coding, tensor.kind), measure)

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
