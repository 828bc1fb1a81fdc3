"""Experts of GPTQ, AWQ and compressed-tensors checkpoints, which stay integers in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.store.base import as_memoryview
from runtime.store.files import FileReader
from runtime.store.integer_tensor import IntegerTensor
from runtime.store.packed.coding import RAW, Integers
from runtime.store.repacked import ForeignLayer, ForeignRows, RepackedStore
from runtime.store.weight_plan import WeightPlan


@dataclass(frozen=True)
class PlannedRows(ForeignRows):
    """The rows that one tensor of a weight plan has."""

    plan: WeightPlan
    source: int
    files: FileReader

    def read(self, expert: int) -> Integers | Tensor:
        tensor, dtype = self.plan.extents(expert)[self.source], self.plan.parameter.dtype
        if not isinstance(tensor, IntegerTensor):
            weights = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.files.read(tensor.file, tensor.offset, as_memoryview(weights), what=tensor.key)
            return weights
        if self.coding == RAW:
            return tensor.load(self.files)
        return tensor.read_integers(self.files, self.coding, dtype)

    @property
    def scratch_bytes(self) -> int:
        tensor = self.plan.extents(0)[self.source]
        if not isinstance(tensor, IntegerTensor):
            return tensor.num_bytes
        if self.coding == RAW:
            return tensor.measure_loading()
        return tensor.measure_integers(self.coding, self.plan.parameter.dtype)


def has_integers(banks: Sequence[dict[str, WeightPlan]]) -> bool:
    """Return whether the experts can be served as integers: some are, and their rows stay rows."""
    plans = [plan for bank in banks for plan in bank.values()]
    return all(plan.is_plain for plan in plans) and any(
        isinstance(extent, IntegerTensor) for plan in plans for extent in plan.extents(0)
    )


def open_integer_store(
    banks: Sequence[dict[str, WeightPlan]], files: FileReader, *, uses_kernels: bool
) -> RepackedStore:
    """Return a store that repacks experts for the kernels of this processor, or for decoding."""
    layers = []
    for bank in banks:
        rows: list[ForeignRows] = []
        for name, plan in bank.items():
            first = 0
            for source, extent in enumerate(plan.extents(0)):
                coding = RAW
                if isinstance(extent, IntegerTensor):
                    coding = extent.choose_coding(uses_kernels=uses_kernels)
                count = math.prod(extent.shape)
                rows.append(PlannedRows(name, first, count, coding, plan, source, files))
                first += count
        layers.append(
            ForeignLayer(
                {name: plan.parameter.shape[1:] for name, plan in bank.items()},
                {name: plan.parameter.dtype for name, plan in bank.items()},
                rows,
                max(plan.parameter.num_experts for plan in bank.values()),
            )
        )
    return RepackedStore(layers, files, uses_kernels=uses_kernels)
