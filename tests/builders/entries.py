"""Small zoo entries, made on the spot."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save

from predictors.base import Signal
from predictors.baselines import PopularityPredictor
from predictors.learned import INPUT, OUTPUT, graph_path
from predictors.spec import ModelSpec
from zoo.card import CardFigure
from zoo.digest import hash_bytes
from zoo.entry import write_entry
from zoo.manifest import EntryManifest


def tiny_spec(**changes: Any) -> ModelSpec:
    """Two layers of eight experts."""
    known = {"model_id": "tiny", "revision": "r1", "config_hash": "c" * 64, "dtype": "float32"}
    shape = {"num_layers": 2, "num_experts": 8, "top_k": 2, "hidden_size": 4}
    return ModelSpec(**{**known, **shape, **changes})


def tiny_graph() -> bytes:
    """scores = hidden W with W [4, 8], as an ONNX file."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", [INPUT, "w"], [OUTPUT])],
        "tiny",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["T", 4])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["T", 8])],
        [numpy_helper.from_array(np.eye(4, 8, dtype=np.float32), "w")],
    )
    opsets = [helper.make_opsetid("", 20)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return model.SerializeToString()


def tiny_entry(folder: Path, **changes: Any) -> EntryManifest:
    """A publishable entry with a graph, tensors, metrics and a card."""
    weights = save({"w": np.ones((2, 3), dtype=np.float32)})
    predictor = {
        "kind": "stride", "options": {"horizon": 2}, "spec": tiny_spec(),
        "signals": {Signal.GATE_INPUT},
        "files": {"predictors/layer-00.onnx": tiny_graph(), "weights.safetensors": weights},
    }  # fmt: skip
    predictor |= {key: changes.pop(key) for key in predictor.keys() & changes.keys()}
    for method in ("options", "files"):
        predictor[method] = partial(dict, predictor[method])
    metrics = {"held_out": {"accuracy": 0.9, "fetch_rate": 0.5, "good_pred": 0.45}}
    arguments: dict[str, Any] = {
        "name": "tiny/stride", "metrics": metrics, "parity": {"tokens": 100, "same_top_k": 1.0},
        "trace_digest": "a" * 64, "created": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return write_entry(folder, SimpleNamespace(**predictor), **{**arguments, **changes})


def mlp_entry(folder: Path) -> None:
    """Two layers, so one network: from layer 0 to layer 1."""
    files = {graph_path(0, 1): tiny_graph()}
    tiny_entry(folder, name="tiny/mlp", kind="mlp", options={"horizon": 1}, files=files)


def tiny_training(*, hub_dataset: str | None = None) -> dict[str, Any]:
    """The record of a training with seed 7."""
    trace = {
        "digest": "a" * 64, "dataset": "pydocs", "hub_dataset": hub_dataset,
        "signals": ["gate_input", "experts"], "num_tokens": 1000, "prompts_digest": "b" * 64,
        "recording": {"seed": 7}, "was_named": False,
    }  # fmt: skip
    return {
        "command": "moecast train tiny seed=7", "options": {"seed": 7}, "seed": 7, "threads": 2,
        "code_revision": "c" * 40,
        "versions": {"torch": "2.13.0", "transformers": "5.0.0", "lightning": "2.6.6"},
        "python": "3.12.0", "platform": "Linux", "machine": "2 cores of a processor",
        "trace": trace,
    }  # fmt: skip


def tiny_figure() -> CardFigure:
    """A figure whose bytes nothing parses."""
    return CardFigure(b"\x89PNG\r\n\x1a\n", "Accuracy by layer")


def write_popularity(path: Path, spec, accuracies: list[float | None]) -> Path:
    """An entry whose card has these accuracies."""
    shares = np.random.default_rng(0).random((spec.num_layers, spec.num_experts))
    metrics = {"layers": {"accuracy": accuracies, "accuracy_decode": accuracies}}
    predictor = PopularityPredictor(spec, shares)
    write_entry(path, predictor, name="tiny/popularity", metrics=metrics)
    return path


def forge_card(folder: Path, card: bytes | None) -> None:
    """Gives an entry another card, or none, and makes its digests right, as a forger would."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["files"]["README.md"]
    (folder / "README.md").unlink()
    if card is not None:
        (folder / "README.md").write_bytes(card)
        content["files"]["README.md"] = {"sha256": hash_bytes(card), "size": len(card)}
    data = EntryManifest.model_validate(content).to_bytes()
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_text(f"{hash_bytes(data)}  manifest.json\n")
