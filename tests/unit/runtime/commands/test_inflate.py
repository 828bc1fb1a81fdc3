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
from runtime.store.model_source import identity
from runtime.tools.inflate import checkpoint
from runtime.tools.inflate.checkpoint import partial_folder, write_checkpoint
from runtime.tools.inflate.inflation_plan import make_plan
from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.models import plain_eager, tiny_qwen2_moe

TOKENS = torch.arange(1, 12)[None]
ORIGIN = {"model_id": "a", "revision": "b", "config_hash": "c"}


def inflated(source: Path, output: Path, **sizes) -> Path:
    write_checkpoint(
        make_plan(source, **sizes),
        output,
        origin=ORIGIN,
        advance=lambda _: None,
        shard_bytes=100_000,
    )
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


# One tensor per expert; stacked, gate before up; stacked, pairs with biases; no gate.
@pytest.mark.parametrize("name", ["mixtral", "granitemoe", "gpt_oss", "nemotron_h"])
def test_inflate__computes_the_same_with_larger_experts(tmp_path, name):
    family = FAMILIES[name]
    source = save_family(tmp_path / "source", family)
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
    plan = make_plan(source, expert_bytes=asked)
    assert (plan.neurons, plan.expert_bytes) == (neurons, neurons * 384)
    output = inflated(source, tmp_path / "output", expert_bytes=asked)
    assert expert_bytes(output) == plan.expert_bytes
    config = json.loads((output / "config.json").read_text())
    assert config["moe_intermediate_size"] == neurons
    assert config["shared_expert_intermediate_size"] == 32


def test_inflate__total_size_is_of_all_experts_in_the_stored_dtype(tmp_path):
    source = tiny_qwen2_moe(tmp_path / "source", dtype=torch.bfloat16)
    plan = make_plan(source, dtype="float32", total_bytes=2 * 8 * 73_728)
    assert plan.num_experts * plan.expert_bytes == 2 * 8 * 73_728
    output = inflated(source, tmp_path / "output", dtype="float32", total_bytes=2 * 8 * 73_728)
    assert expert_bytes(output) == 73_728
    assert json.loads((output / "config.json").read_text())["dtype"] == "float32"
    with torch.no_grad():
        before = plain_eager(source, dtype=torch.float32)(TOKENS).logits
        assert torch.allclose(plain_eager(output)(TOKENS).logits, before, atol=1e-5, rtol=0)


def test_inflate__interrupted_carries_on_and_ends_the_same(tmp_path, monkeypatch):
    source = tiny_qwen2_moe(tmp_path / "source")
    whole = inflated(source, tmp_path / "whole", expert_bytes=30_000)
    written = []
    write_tensors = checkpoint.write_tensors

    def failing(path, *args):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path.name)
        write_tensors(path, *args)

    output = tmp_path / "output"
    monkeypatch.setattr(checkpoint, "write_tensors", failing)
    with pytest.raises(OSError, match="No space left"):
        inflated(source, output, expert_bytes=30_000)
    assert not output.exists()
    kept = {name: (partial_folder(output) / name).stat().st_mtime_ns for name in written}
    monkeypatch.setattr(checkpoint, "write_tensors", write_tensors)
    inflated(source, output, expert_bytes=30_000)
    assert {name: (output / name).stat().st_mtime_ns for name in kept} == kept
    assert not partial_folder(output).exists()
    files = sorted(file.name for file in whole.iterdir())
    assert sorted(file.name for file in output.iterdir()) == files
    for name in files:
        assert (output / name).read_bytes() == (whole / name).read_bytes(), name


def test_inflate__another_size_does_not_carry_on(tmp_path, monkeypatch):
    source = tiny_qwen2_moe(tmp_path / "source")
    output = tmp_path / "output"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_description", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            inflated(source, output, expert_bytes=30_000)
    inflated(source, output, expert_bytes=60_000)
    assert expert_bytes(output) == 73_728


def test_inflate__refuses_what_it_cannot_do(tmp_path, monkeypatch):
    source = tiny_qwen2_moe(tmp_path / "source")
    with pytest.raises(CheckpointError, match="already takes 6144 bytes"):
        make_plan(source, expert_bytes=6_000)
    with pytest.raises(CheckpointError, match="source exists; remove it"):
        inflated(source, source, expert_bytes=30_000)
    free = checkpoint.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: free)
    with pytest.raises(CheckpointError, match=r"bytes are needed and 1000 are free"):
        inflated(source, tmp_path / "output", expert_bytes=30_000)
    assert not partial_folder(tmp_path / "output").exists()


def test_inflate__names_the_field_that_shared_experts_follow_too(tmp_path):
    family = FAMILIES["deepseek_v3"]
    source = save_family(tmp_path / "source", family)
    with pytest.raises(CheckpointError, match=r"moe_intermediate_size also sets .*shared_experts"):
        make_plan(source, expert_bytes=50_000)


def test_command__keeps_the_identity_that_predictors_were_made_for(tmp_path):
    source = tiny_qwen2_moe(tmp_path / "source")
    model = ModelConfig(name="tiny", id=str(source))
    output = tmp_path / "made" / "output"
    results = run(InflateConfig(model=model, output=output, expert_size="30KiB"))
    assert results["expert_bytes"] == expert_bytes(output) == 49_152
    again = ModelConfig(name="other", id=str(output))
    assert identity(output, again) == identity(source, model)
