"""Packed stores of tiny models, made on the spot."""

from pathlib import Path

from predictors.spec import ModelSpec
from runtime.config import ModelConfig
from runtime.hf.loading import load_stripped
from runtime.store.checkpoint import CheckpointStore
from runtime.store.model_source import fingerprint
from runtime.store.packed.coding import RAW, Coding
from runtime.store.packed.layout import build_packed_layout
from runtime.store.packed.manifest import StoreContents, describe_contents
from runtime.store.packed.writer import pack


def source_of(model: Path, *, dtype: str = "auto") -> tuple[CheckpointStore, ModelSpec]:
    """The checkpoint's own store and the model's spec."""
    stripped = load_stripped(model, dtype)
    config = ModelConfig(name="tiny", id=str(model), dtype=dtype)
    return stripped.open_decoded(), stripped.spec(model, config)


def plan(model: Path, *, coding: Coding = RAW) -> tuple[CheckpointStore, StoreContents]:
    """What `pack` takes."""
    source, spec = source_of(model)
    contents = describe_contents(
        [build_packed_layout(layout, coding=coding) for layout in source.layouts],
        source.experts_per_layer,
        spec=spec,
        fingerprint=fingerprint(model),
        tool="test",
    )
    return source, contents


def packed(model: Path, output: Path, *, coding: Coding = RAW) -> Path:
    """The store's folder."""
    source, contents = plan(model, coding=coding)
    pack(source, contents, output)
    source.close()
    return output
