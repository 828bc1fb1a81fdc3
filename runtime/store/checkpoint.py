"""Experts that are read in place, from the files of a checkpoint: safetensors or GGUF."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from runtime.store.base import ExpertStore
from runtime.store.files import BLOCK, FileRange, FileReader
from runtime.store.layout import Decoder, ExpertLayout, Part, Piece, group_chunks, lay_out
from runtime.store.weight_plan import FusedParameter


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


@dataclass(frozen=True)
class LayerSources:
    """A layer's parameters, and what they are filled from, in order."""

    parameters: Sequence[FusedParameter]
    sources: Sequence[PartSource]
    decoders: Mapping[str, Decoder] = field(default_factory=dict)
    """By parameter that stays in a slot as the checkpoint has it."""
    block: int = BLOCK
    """1: parts lie close together, and are no record of a packed store."""


class CheckpointStore(ExpertStore):
    """Reads chunks of experts from a checkpoint into slots. Thread-safe.

    Args:
        layers: those with routed experts, bottom first.
    """

    def __init__(self, layers: Sequence[LayerSources], files: FileReader):
        self._files = files
        self.layouts = layouts = list[ExpertLayout]()
        self._chunks: list[list[list[tuple[Part, PartSource]]]] = []
        for layer in layers:
            shapes = {parameter.name: parameter.shape[1:] for parameter in layer.parameters}
            dtypes = {parameter.name: parameter.dtype for parameter in layer.parameters}
            laid = lay_out(shapes, dtypes, group_chunks(layer.sources, shapes), block=layer.block)
            layout = replace(laid, decoders=layer.decoders, reads_parts=True)
            layouts.append(layout)
            sources = iter(layer.sources)
            self._chunks.append(
                [[(part, next(sources)) for part in chunk] for chunk in layout.chunks]
            )
        self.experts_per_layer = [
            max(parameter.num_experts for parameter in layer.parameters) for layer in layers
        ]
        self.scratch_bytes = max(one.scratch_bytes for layer in layers for one in layer.sources)

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        for chunk in chunks:
            for part, source in self._chunks[layer][chunk]:
                source.read(expert, slot[part.offset : part.end])

    def extents(self, layer: int, expert: int) -> list[FileRange] | None:
        sources = [source for chunk in self._chunks[layer] for _, source in chunk]
        places = [place for source in sources if (place := source.place(expert)) is not None]
        return places if len(places) == len(sources) else None
