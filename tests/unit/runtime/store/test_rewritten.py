"""A model without its experts is served from its packed store, and is nothing without it."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from predictors.errors import MoecastError
from runtime.config import ModelConfig, Quantise
from runtime.errors import CheckpointError, StoreError
from runtime.hf.loading import load_plain
from runtime.store.model_source import DIGESTS, INFLATED, WITHOUT_EXPERTS, identity
from tests.builders.gguf_files import gguf_file
from tests.builders.integers import save_integers
from tests.builders.models import read_weights, tiny_qwen2_moe
from tests.builders.packed import flip_bit, pack_model
from tests.builders.quantised import QUANTISED, quantised, rewrite
from tests.builders.served import serve, serve_logits

PACKED_INTEGERS = ["compressed-tensors", "gptq", "gptq int8", "awq"]


def save_checkpoint(folder: Path, kind: str | None) -> Path:
    """A tiny checkpoint: plain, of a family that is published quantised, or packed integers."""
    if kind is None:
        return tiny_qwen2_moe(folder)
    return quantised(folder, kind) if kind in QUANTISED else save_integers(folder, kind)


def list_tensors(folder: Path) -> dict[str, int]:
    """Bytes of each tensor by name."""
    return {name: tensor.nbytes for name, tensor in read_weights(folder).items()}


def make_parts(folder: Path, *, seed: int = 0) -> tuple[Path, Path, Path]:
    """The checkpoint, its store, and the model without experts."""
    model, dense = tiny_qwen2_moe(folder / "model", seed=seed), folder / "dense"
    return model, pack_as_int8(model, folder / "store", dense), dense


def pack_as_int8(model: Path, store: Path, dense: Path) -> Path:
    return pack_model(model, store, dense_output=dense, quantise=Quantise.INT8)


def compute_logits(model: Path, store: Path | None) -> torch.Tensor:
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    return serve_logits(model, tokens, store=store, budget="40%", system="on-demand")


CHECKPOINTS = [
    *((kind, Quantise.NONE) for kind in (*QUANTISED, *PACKED_INTEGERS)),
    *((kind, Quantise.INT8) for kind in (None, next(iter(QUANTISED)), "gptq")),
]


@pytest.mark.parametrize(("kind", "quantise"), CHECKPOINTS)
def test_write_without_experts__serves_as_the_checkpoint_that_is_gone(tmp_path, kind, quantise):
    model, dense = save_checkpoint(tmp_path / "model", kind), tmp_path / "d"
    store = pack_model(model, tmp_path / "s", dense_output=dense, quantise=quantise)
    expected, stored = compute_logits(model, store), list_tensors(model)
    shutil.rmtree(model)
    assert torch.equal(compute_logits(dense, store), expected)
    # Weights that are not experts keep their bytes: what is dequantised would take more.
    routed = re.compile(r"\.experts\.(\d+\.|gate_up_proj|down_proj)")
    kept = {name: size for name, size in stored.items() if not routed.search(name)}
    assert list_tensors(dense) == kept
    assert len(kept) < len(stored)


@pytest.mark.parametrize("kind", [None, "gptq"])
def test_layers_that_predict_several_tokens__are_named_in_a_line_and_left_out(
    tmp_path, kind, caplog, capfd
):
    """As DeepSeek, GLM and Qwen publish them: behind the last layer, with experts of their own."""
    model, dense = save_checkpoint(tmp_path / "model", kind), tmp_path / "d"
    expected, own = compute_logits(model, None), list_tensors(model)
    last = max(name.split(".")[2] for name in own if name.startswith("model.layers."))
    more = f".{int(last) + 1}."

    def repeat_last(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor, name.replace(f"layers.{last}.", f"layers{more}"): tensor.clone()}

    rewrite(model, repeat_last)
    assert any("experts" in name for name in sorted(list_tensors(model).keys() - own.keys()))
    capfd.readouterr()
    store = pack_model(model, tmp_path / "s", dense_output=dense)
    (line,) = (line for line in caplog.messages if "no part of" in line)
    assert "MoeForCausalLM and are left out, such as model.layers" in line
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
    assert list_tensors(dense).keys() == {name for name in own if ".experts." not in name}
    assert torch.equal(compute_logits(model, store), expected)
    shutil.rmtree(model)
    caplog.clear()
    assert torch.equal(compute_logits(dense, store), expected)
    assert not any("no part of" in line for line in caplog.messages)


def test_pack__refuses_a_gguf_file_without_its_experts(tmp_path):
    file = gguf_file("qwen3moe-Q4_0")
    with pytest.raises(StoreError, match="cannot be written without its experts"):
        pack_model(file, tmp_path / "store", dense_output=tmp_path / "dense")
    assert not list(tmp_path.iterdir())


def test_write_without_experts__is_refused_without_its_store_or_altered(tmp_path):
    _, store, dense = make_parts(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"without its experts.*store\.path"):
        serve(dense, budget="40%")
    # Transformers would fill the experts with random numbers.
    with pytest.raises(CheckpointError, match="without its experts"):
        load_plain(dense, dtype="auto")
    _, other, _ = make_parts(tmp_path / "b", seed=1)
    with pytest.raises(StoreError, match="other weights"):
        compute_logits(dense, other)
    file = min(dense.glob("*.safetensors"))
    flip_bit(file, 8 * file.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="was altered"):
        compute_logits(dense, store)


UNNAMED = '{"origin": {"model_id": "a", "revision": 1, "config_hash": null}}'


@pytest.mark.parametrize("name", [INFLATED, WITHOUT_EXPERTS, DIGESTS])
@pytest.mark.parametrize("content", ["{", "[]", '{"origin": 1}', '{"origin": {}}', UNNAMED])
def test_identity__of_a_damaged_record_is_refused(tiny, name, content):
    (tiny / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        identity(tiny, ModelConfig(id=str(tiny)))


def test_write_without_experts__leaves_what_stands_in_its_place(tmp_path):
    model, store, dense = make_parts(tmp_path)
    before = sorted(file.stat().st_mtime_ns for file in dense.iterdir())
    pack_as_int8(model, store, dense)
    assert sorted(file.stat().st_mtime_ns for file in dense.iterdir()) == before
    with pytest.raises(MoecastError, match="exists and is not this model"):
        pack_as_int8(model, store, model)
