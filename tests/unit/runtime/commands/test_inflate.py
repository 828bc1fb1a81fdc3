"""Inflated models: the same text, the requested size, complete or absent."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.commands.inflate import run
from runtime.config import InflateConfig, ModelConfig
from runtime.errors import CheckpointError
from runtime.store import rewritten
from runtime.store.model_source import identity
from runtime.tools.inflate import plan_inflation, write_inflated
from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.models import plain_eager, read_weights, set_fields, tiny_qwen2_moe
from tests.builders.quantised import quantised
from tests.builders.served import serve_logits

TOKENS = torch.arange(1, 12)[None]
ORIGIN = {"model_id": "a", "revision": "b", "config_hash": "c"}


def inflated(source: Path, output: Path, **sizes) -> Path:
    write_inflated(plan_inflation(source, **sizes), output, origin=ORIGIN)
    return output


@torch.no_grad()
def logits(folder: Path, **options) -> torch.Tensor:
    """Logits of plain Transformers."""
    return plain_eager(folder, **options)(TOKENS).logits


def expert_bytes(folder: Path) -> int:
    """Bytes of one expert."""
    weights = read_weights(folder)
    return sum(weights[name].nbytes for name in weights if "layers.0.mlp.experts.3." in name)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_inflate__computes_the_same_with_larger_experts(tmp_path, name):
    source = save_family(tmp_path / "source", FAMILIES[name])
    output = inflated(source, tmp_path / "output", expert_bytes=50_000)
    # Longer rows may be added up in another order.
    assert torch.allclose(logits(output), logits(source), atol=1e-5, rtol=0)


def test_inflate__is_served_bitwise(tiny, tmp_path):
    output = inflated(tiny, tmp_path / "output", expert_bytes=30_000)
    assert torch.equal(serve_logits(output, TOKENS, budget="30%"), logits(output))


# A neuron of the builder's experts has 3 x 32 values of 4 bytes: 384 bytes; 64 neurons are a step.
@pytest.mark.parametrize(("asked", "neurons"), [(49_000, 128), (49_152, 128), (49_153, 192)])
def test_inflate__reaches_the_nearest_size_above(tiny, tmp_path, asked, neurons):
    plan = plan_inflation(tiny, expert_bytes=asked)
    assert (plan.neurons, plan.expert_bytes) == (neurons, neurons * 384)
    output = inflated(tiny, tmp_path / "output", expert_bytes=asked)
    assert expert_bytes(output) == plan.expert_bytes
    config = json.loads((output / "config.json").read_text())
    sizes = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    assert sizes == (neurons, 32)


def test_inflate__total_size_is_of_all_experts_in_the_stored_dtype(tmp_path):
    source = tiny_qwen2_moe(tmp_path / "source", dtype=torch.bfloat16)
    set_fields(source, torch_dtype="bfloat16")
    asked = {"dtype": "float32", "total_bytes": 2 * 8 * 73_728}
    plan = plan_inflation(source, **asked)
    assert plan.num_experts * plan.expert_bytes == 2 * 8 * 73_728
    output = inflated(source, tmp_path / "output", **asked)
    assert expert_bytes(output) == 73_728
    written = json.loads((output / "config.json").read_text())
    assert (written["dtype"], "torch_dtype" in written) == ("float32", False)
    assert torch.allclose(logits(output), logits(source, dtype=torch.float32), atol=1e-5, rtol=0)


def test_inflate__interrupted_leaves_no_folder_and_begins_anew(tiny, tmp_path, monkeypatch):
    whole, output = inflated(tiny, tmp_path / "whole", expert_bytes=30_000), tmp_path / "output"
    with monkeypatch.context() as patched:
        patched.setattr(rewritten, "write_json", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            inflated(tiny, output, expert_bytes=60_000)
    assert not output.exists()
    inflated(tiny, output, expert_bytes=30_000)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "whole", "output"}
    for file in whole.iterdir():
        assert (output / file.name).read_bytes() == file.read_bytes(), file.name


def test_inflate__refuses_what_it_cannot_do(tiny, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="already takes 6144 bytes"):
        plan_inflation(tiny, expert_bytes=6_000)
    other = save_family(tmp_path / "other", FAMILIES["deepseek_v3"])
    for folder in (other, quantised(tmp_path / "fp8", "qwen3_moe")):
        with pytest.raises(CheckpointError, match="copies of qwen2_moe .* not quantised"):
            plan_inflation(folder, expert_bytes=50_000)
    model = ModelConfig(name="tiny", id=str(tiny))
    with pytest.raises(CheckpointError, match="model exists; remove it"):
        run(InflateConfig(model=model, output=tiny, expert_size="30KiB"))
    free = rewritten.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(rewritten.shutil, "disk_usage", lambda _: free)
    with pytest.raises(CheckpointError, match=r"bytes are needed and 1000 are free"):
        inflated(tiny, tmp_path / "output", expert_bytes=30_000)


def test_command__keeps_the_identity_that_predictors_were_made_for(tiny, tmp_path, monkeypatch):
    model, output = ModelConfig(name="tiny", id=str(tiny)), tmp_path / "made" / "output"
    results = run(InflateConfig(model=model, output=output, expert_size="30KiB"))
    assert results["expert_bytes"] == expert_bytes(output) == 49_152
    assert identity(output, ModelConfig(name="other", id=str(output))) == identity(tiny, model)
    # A folder is one, however its path is written.
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert identity(tiny, replace(model, id=f"~/{tiny.name}")) == identity(tiny, model)
