"""`model.moecast`: what a served model can be asked beside generating."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from predictors.spec import ModelSpec
from runtime.engine.engine import Engine
from runtime.engine.front import Front
from runtime.hf.probes import Probes

if TYPE_CHECKING:
    from runtime.generation.batch.result_journal import BatchResult


class ModelHandle:
    """Statistics and the end of a model that `runtime.load` made; a context manager."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        spec: ModelSpec,
        engine: Engine,
        front: Front,
        probes: Probes,
        folder: Path,
    ):
        self.spec = spec
        self.folder = folder
        self._model = model
        self.engine = engine
        self.front = front
        self.probes = probes

    @property
    def budget_bytes(self) -> int:
        """What the arena takes: no expert's bytes are anywhere else."""
        return self.engine.arena_bytes

    def stats(self) -> dict[str, Any]:
        """Counters, times (seconds) and memory (bytes) since the model was loaded."""
        return self.engine.report()

    def generate_many(self, prompts: Iterable[Any], **options: Any) -> "list[BatchResult]":
        """Continues many prompts, at the highest throughput (`batch.many`)."""
        # Here, because serving one prompt needs none of it.
        from runtime.generation.batch.generate_many import generate_many

        return generate_many(self._model, prompts, **options)

    def __enter__(self) -> "ModelHandle":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker and closes the files; the model can not be used afterwards."""
        self.probes.close()
        self.engine.close()
