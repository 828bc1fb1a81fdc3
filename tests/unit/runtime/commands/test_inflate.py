"""Inflated models: the same text, the requested size, complete or absent."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import runtime
from runtime.commands.inflate import run
from runtime.config import InflateConfig, ModelConfig
from runtime.errors import CheckpointError
from runtime.store import rewritten
from runtime.store.model_source import identity
from runtime.tools.inflate import plan_inflation, write_inflated
from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.models import plain_eager, tiny_qwen2_moe

TOKENS = torch.arange(1, 12)[None]
ORIGIN = {"model_id": "a", "revision": "b", "config_hash": "c"}


def inflated(source: Path, output: Path, **sizes) -> Path:
    write_inflated(plan_inflation(source, **sizes), output, origin=ORIGIN)
    return output


def expert_bytes(folder: Path, layer: int = 0, expert: int = 3) -> int:
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118
                if f"layers.{layer}.mlp.experts.{expert}." in key:
                    tensor = handle.get_tensor(key)
                    total += tensor.numel() * tensor.element_size()
    return total


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_inflate__computes_the_same_with_larger_experts(tmp_path, name):
    source = save_family(tmp_path / "source", FAMILIES[name])
    output = inflated(source, tmp_path / "output", expert_bytes=50_000)
    with torch.no_grad():
        before = plain_eager(source)(TOKENS).logits
        after = plain_eager(output)(TOKENS).logits
    # Longer rows may be added up in another order.
    assert torch.allclose(after, before, atol=1e-5, rtol=0)


def test_inflate__is_served_bitwise(tmp_path):
    source = tiny_qwen2_moe(tmp_path / "source")
    output = inflated(source, tmp_path / "output", expert_bytes=30_000)
    with torch.no_grad():
        expected = plain_eager(output)(TOKENS).logits
        model = runtime.load(output, budget="30%")
        with model.moecast:
            assert torch.equal(model(TOKENS).logits, expected)


# A neuron of the builder's experts has 3 x 32 values of 4 bytes: 384 bytes; 64 neurons are a step.
@pytest.mark.parametrize(("asked", "neurons"), [(49_000, 128), (49_152, 128), (49_153, 192)])
def test_inflate__reaches_the_nearest_size_above(tmp_path, asked, neurons):
    source = tiny_qwen2_moe(tmp_path / "source")
    plan = plan_inflation(source, expert_bytes=asked)
    assert (plan.neurons, plan.expert_bytes) == (neurons, neurons * 384)
    output = inflated(source, tmp_path / "output", expert_bytes=asked)
    assert expert_bytes(output) == plan.expert_bytes
    config = json.loads((output / "config.json").read_text())
    assert config["moe_intermediate_size"] == neurons
    assert config["shared_expert_intermediate_size"] == 32


def test_inflate__total_size_is_of_all_experts_in_the_stored_dtype(tmp_path):
    source = tiny_qwen2_moe(tmp_path / "source", dtype=torch.bfloat16)
    plan = plan_inflation(source, dtype="float32", total_bytes=2 * 8 * 73_728)
    assert plan.num_experts * plan.expert_bytes == 2 * 8 * 73_728
    output = inflated(source, tmp_path / "output", dtype="float32", total_bytes=2 * 8 * 73_728)
    assert expert_bytes(output) == 73_728
    assert json.loads((output / "config.json").read_text())["dtype"] == "float32"
    with torch.no_grad():
        before = plain_eager(source, dtype=torch.float32)(TOKENS).logits
        assert torch.allclose(plain_eager(output)(TOKENS).logits, before, atol=1e-5, rtol=0)


def test_inflate__interrupted_leaves_no_folder_and_begins_anew(tmp_path, monkeypatch):
    source = tiny_qwen2_moe(tmp_path / "source")
    whole = inflated(source, tmp_path / "whole", expert_bytes=30_000)
    output = tmp_path / "output"
    with monkeypatch.context() as patched:
        patched.setattr(rewritten, "write_json", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            inflated(source, output, expert_bytes=60_000)
    assert not output.exists()
    inflated(source, output, expert_bytes=30_000)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "whole", "output"}
    for file in whole.iterdir():
        assert (output / file.name).read_bytes() == file.read_bytes(), file.name


def test_inflate__refuses_what_it_cannot_do(tmp_path, monkeypatch):
    source = tiny_qwen2_moe(tmp_path / "source")
    with pytest.raises(CheckpointError, match="already takes 6144 bytes"):
        plan_inflation(source, expert_bytes=6_000)
    other = save_family(tmp_path / "other", FAMILIES["deepseek_v3"])
    with pytest.raises(CheckpointError, match="copies of qwen2_moe and qwen3_moe models"):
        plan_inflation(other, expert_bytes=50_000)
    model = ModelConfig(name="tiny", id=str(source))
    with pytest.raises(CheckpointError, match="source exists; remove it"):
        run(InflateConfig(model=model, output=source, expert_size="30KiB"))
    free = rewritten.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(rewritten.shutil, "disk_usage", lambda _: free)
    with pytest.raises(CheckpointError, match=r"bytes are needed and 1000 are free"):
        inflated(source, tmp_path / "output", expert_bytes=30_000)


def test_command__keeps_the_identity_that_predictors_were_made_for(tmp_path):
    source = tiny_qwen2_moe(tmp_path / "source")
    model = ModelConfig(name="tiny", id=str(source))
    output = tmp_path / "made" / "output"
    results = run(InflateConfig(model=model, output=output, expert_size="30KiB"))
    assert results["expert_bytes"] == expert_bytes(output) == 49_152
    again = ModelConfig(name="other", id=str(output))
    assert identity(output, again) == identity(source, model)
