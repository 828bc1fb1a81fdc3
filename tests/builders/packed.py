"""Packed stores of tiny models, made on the spot."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from predictors.spec import ModelSpec
from runtime.commands.pack import run
from runtime.config import ModelConfig, PackConfig
from runtime.hf.loading import load_stripped
from runtime.store.base import ExpertStore, allocate_aligned
from runtime.store.layout import build_packed_layout
from runtime.store.model_source import fingerprint
from runtime.store.packed.coding import RAW, Coding
from runtime.store.packed.manifest import StoreContents, canonical_json, describe_contents
from runtime.store.packed.writer import pack


def source_of(model: Path, *, dtype: str = "auto") -> tuple[ExpertStore, ModelSpec]:
    """The checkpoint's own store and the model's spec."""
    stripped = load_stripped(model, dtype)
    config = ModelConfig(name="tiny", id=str(model), dtype=dtype)
    return stripped.open_store(decodes=True), stripped.spec(model, config)


def open_both(model: Path) -> tuple[ExpertStore, ExpertStore]:
    """The checkpoint's store as it is served, and as one that decodes."""
    stripped = load_stripped(model, "auto")
    return stripped.open_store(), stripped.open_store(decodes=True)


def plan(model: Path, *, coding: Coding = RAW) -> tuple[ExpertStore, StoreContents]:
    """What `pack` takes."""
    source, spec = source_of(model)
    layouts = [build_packed_layout(layout, coding=coding) for layout in source.layouts]
    known = {"spec": spec, "fingerprint": fingerprint(model), "tool": "test"}
    return source, describe_contents(layouts, source.experts_per_layer, **known)


def packed(model: Path, output: Path, *, coding: Coding = RAW) -> Path:
    """The store's folder."""
    source, contents = plan(model, coding=coding)
    pack(source, contents, output)
    source.close()
    return output


def pack_model(model: Path, output: Path, **options: Any) -> Path:
    """The folder of the store that `moecast pack` writes with these options."""
    run(PackConfig(model=ModelConfig(name="tiny", id=str(model)), output=output, **options))
    return output


def read_expert(
    store: ExpertStore, layer: int, expert: int, *, chunks: Iterable[range] | None = None
) -> dict[str, Any]:
    """The weights of an expert by parameter, read as a whole or in these parts one by one."""
    layout = replace(store.layouts[layer], uses_kernels=False)
    slot = allocate_aligned(layout.num_bytes)
    for some in chunks or [range(len(layout.chunks))]:
        store.read(layer, expert, some, slot)
    return layout.weights(slot)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fails unless an expert's weights are these, bit for bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def flip_bit(file: Path, bit: int) -> None:
    """Flips one bit of a file, counted from its beginning."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def altered(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A forged manifest: changed, and its digest made to fit."""
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value["contents"])
    body = {key: value[key] for key in ("contents", "checksums_sha256")}
    value["digest"] = hashlib.sha256(canonical_json(body)).hexdigest()
    path.write_text(json.dumps(value))
