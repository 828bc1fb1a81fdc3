"""A model without its experts is served from its packed store, and is nothing without it."""

import shutil
from pathlib import Path

import pytest
import torch

import runtime
from predictors.errors import MoecastError
from runtime.commands import pack
from runtime.config import ModelConfig, PackConfig, Quantise
from runtime.errors import CheckpointError, StoreError
from runtime.hf.loading import load_plain
from tests.builders.models import tiny_qwen2_moe


def pack_model(folder: Path, *, seed: int = 0) -> tuple[Path, Path, Path]:
    """The checkpoint, its store, and the model without experts."""
    model = tiny_qwen2_moe(folder / "model", seed=seed)
    store, dense = folder / "store", folder / "dense"
    config = PackConfig(
        model=ModelConfig(name="model", id=str(model)),
        output=store,
        dense_output=dense,
        quantise=Quantise.INT8,
    )
    pack.run(config)
    return model, store, dense


@torch.no_grad()
def compute_logits(model: Path, store: Path) -> torch.Tensor:
    served = runtime.load(str(model), store=store, budget="40%", system="on-demand")
    with served.moecast:
        return served(torch.tensor([[3, 1, 4, 1, 5]])).logits


def test_write_dense_folder__serves_as_the_whole_checkpoint_that_is_gone(tmp_path):
    model, store, dense = pack_model(tmp_path)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    expected = compute_logits(model, store)
    shutil.rmtree(model)
    assert torch.equal(compute_logits(dense, store), expected)
    assert sum(file.stat().st_size for file in dense.glob("*.safetensors")) < weights / 2


def test_write_dense_folder__is_refused_without_its_store(tmp_path):
    _, _, dense = pack_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"without its experts.*store\.path"):
        runtime.load(str(dense), budget="40%")
    # Transformers would fill the experts with random numbers.
    with pytest.raises(CheckpointError, match="without its experts"):
        load_plain(dense, dtype="auto")


def test_write_dense_folder__refuses_the_store_of_other_weights(tmp_path):
    _, _, dense = pack_model(tmp_path / "a")
    _, other, _ = pack_model(tmp_path / "b", seed=1)
    with pytest.raises(StoreError, match="other weights"):
        compute_logits(dense, other)


def test_write_dense_folder__notices_altered_weights(tmp_path):
    _, store, dense = pack_model(tmp_path)
    file = next(iter(sorted(dense.glob("*.safetensors"))))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="was altered"):
        compute_logits(dense, store)


def test_write_dense_folder__leaves_what_stands_in_its_place(tmp_path):
    model, store, dense = pack_model(tmp_path)
    before = sorted(file.stat().st_mtime_ns for file in dense.iterdir())
    again = PackConfig(
        model=ModelConfig(name="model", id=str(model)),
        output=store,
        dense_output=dense,
        quantise=Quantise.INT8,
    )
    pack.run(again)
    assert sorted(file.stat().st_mtime_ns for file in dense.iterdir()) == before
    again.dense_output = model
    with pytest.raises(MoecastError, match="exists and is not this model"):
        pack.run(again)
