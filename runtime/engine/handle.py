"""`model.moecast`: statistics and the end of a model that `runtime.load` has loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from predictors.spec import ModelSpec
from runtime.config import Exact, ModelConfig
from runtime.engine.auto_budget import AutoBudget
from runtime.engine.engine import Engine
from runtime.engine.memory import unfreeze_objects
from runtime.hf.adapters.base import LayerExperts
from runtime.hf.dense_stream import DenseStream
from runtime.hf.grouped import GroupedExperts, SlotSource
from runtime.hf.layers import MoeLayer
from runtime.hf.probes import EventListener, Probes
from runtime.store.dense_source import DenseCodes


class EngineInterface(EventListener, SlotSource, Protocol):
    """Receives a model's events and provides its experts."""


@dataclass(eq=False, kw_only=True, repr=False)
class ModelHandle:
    """Statistics and the end of a model that `runtime.load` has loaded; a context manager."""

    config: ModelConfig
    spec: ModelSpec
    folder: Path
    layers: Sequence[MoeLayer]
    engine: Engine
    probes: Probes
    experts: Sequence[LayerExperts | GroupedExperts]
    exact: Exact = Exact.EAGER
    """Transformers' implementation whose bits outputs have, where experts are not quantised."""
    block_heights: Sequence[int] = ()
    """Numbers of rows of blocks in which sequences of a group share products, ascending; none if
    each is computed by itself."""
    auto_budget: AutoBudget | None = None
    """The budget as computed from free memory; None for a budget that was given."""

    dense_stream: DenseStream | None = None
    """Moves the layers' dense weights; None while they are in memory."""

    dense_codes: DenseCodes | None = None
    """Codes of dense weights that were quantised; None: none were."""

    def connect(self, target: EngineInterface) -> None:
        """Send events and requests of experts to `target`; only between two forward passes."""
        self.probes.listener = target
        for experts in self.experts:
            experts.source = target

    @property
    def budget_bytes(self) -> int:
        """Size of the arena: no expert's bytes are anywhere else."""
        return self.engine.arena_bytes

    def stats(self) -> dict[str, Any]:
        """Counters, times (seconds) and memory (bytes) since the model was loaded."""
        return self.engine.report()

    def __enter__(self) -> "ModelHandle":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transfer threads and close the files; the model cannot be used afterwards."""
        self.probes.close()
        if self.dense_stream is not None:
            self.dense_stream.close(restore=False)
        try:
            self.engine.close()
        finally:
            unfreeze_objects()
