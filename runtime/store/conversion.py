"""Converts one expert's tensors of a checkpoint as Transformers' own operations do."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from runtime.errors import CheckpointError
from runtime.store.base import READERS
from runtime.store.dequantise import SCALE_ENDS, find_dequantiser, require_finite_scales
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


class ExpertConversion:
    """Makes one expert's part of a parameter of the tensors that the checkpoint has for it."""

    def __init__(self, model: PreTrainedModel, plan: WeightPlan):
        self._model = model
        self.plan = plan
        self._dequantise = find_dequantiser(plan)

    @property
    def key(self) -> tuple[object, ...]:
        """Sizes on which the memory of a conversion depends."""
        kinds = [extent.kind for extents in self.plan.kinds for extent in extents]
        return (*self.plan.operations, *kinds, self.plan.parameter.dtype)

    @torch.no_grad()
    def convert(self, tensors: list[Tensor]) -> Tensor:
        """Return the parameter's values; takes the tensors out of their list.

        Cast first where the library casts first; quantised storage never before the library's
        dequantisation has seen it.

        Raises:
            CheckpointError: the operations make something else than the parameter.
            TransferError: a scale of the quantised numbers is not finite.
        """
        plan = self.plan
        converter, parameter = plan.converter, plan.parameter
        assert converter is not None
        for name, tensor in zip(plan.sources, tensors, strict=True):
            # On a device the answer would make each layer wait.
            if name.endswith(SCALE_ENDS) and tensor.device.type == "cpu":
                require_finite_scales(tensor, f"{parameter.target}, {name}")
        if self._dequantise is not None and tensors[0].device.type == "cpu":
            dequantised = self._dequantise(tensors)
            tensors.clear()
            return dequantised
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
        if result.shape not in (parameter.shape[1:], (1, *parameter.shape[1:])):
            raise CheckpointError(
                f"{parameter.target}: the library's {', '.join(plan.operations)} make "
                f"{tuple(result.shape)} of one expert, not {parameter.shape[1:]}"
            )
        return result.detach()

    def decode(self, tensors: list[Tensor]) -> Tensor:
        """Return the parameter as `convert` makes it, in its own shape and dtype."""
        parameter = self.plan.parameter
        result = self.convert(tensors).to(parameter.dtype)
        return result.reshape(parameter.shape[1:]).contiguous()

    def measure_reads(self) -> int:
        """Return the memory that `READERS` reads take, of which one converts at a time.

        The others may have read their tensors already.

        Raises:
            CheckpointError: the operations cannot read these tensors.
        """
        most = 0
        for extents in self.plan.kinds:
            loading = sum(extent.measure_loading() for extent in extents)
            at_work = max(loading, self.measure_bytes(extents))
            most = max(most, (READERS - 1) * loading + at_work)
        return most

    def measure_bytes(self, extents: Sequence[StoredTensor]) -> int:
        """Return the most memory that `convert` takes, its tensors and its result included.

        Raises:
            CheckpointError: the operations cannot read these tensors.
        """
        return self._measure(lambda: self.convert([_zeros(extent) for extent in extents]))

    def measure_decoding(self) -> int:
        """As `measure_bytes`, of `decode` and without its tensors."""
        tensors = [_zeros(extent) for extent in self.plan.extents(0)]
        return self._measure(lambda: self.decode([*tensors]), apart_from=tensors)

    def _measure(self, run: Callable[[], object], *, apart_from: Sequence[Tensor] = ()) -> int:
        plan = self.plan
        try:
            return measure_peak_bytes(run, apart_from=apart_from)
        except (ValueError, RuntimeError, IndexError, AssertionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{plan.parameter.target}: the library's {', '.join(plan.operations)} cannot "
                f"read this checkpoint's {', '.join(plan.sources)}: {error}"
            ) from error


def _zeros(extent: StoredTensor) -> Tensor:
    raw = torch.zeros(extent.num_bytes, dtype=torch.uint8)  # no dtype's own zeros needed
    return raw.view(extent.dtype).view(extent.shape)


class _Live(TorchDispatchMode):
    """Counts bytes of live tensors that are created within the context."""

    def __init__(self, apart_from: Sequence[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._apart_from = {tensor.untyped_storage()._cdata for tensor in apart_from}
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
        if key in self._storages or key in self._apart_from:
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


def measure_peak_bytes(
    computation: Callable[[], object], *, apart_from: Sequence[Tensor] = ()
) -> int:
    """Runs the computation; the most bytes that its tensors took at one moment.

    Each allocation counts in full, from the operation that makes it until the last tensor that
    shows it is gone. The test compares it with the allocator's own account.

    Args:
        apart_from: existing tensors, whose views are not counted.
    """
    live = _Live(apart_from)
    with live:
        computation()
    return live.peak_bytes
