"""Measures the temporary memory of a computation."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
