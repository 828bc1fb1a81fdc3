"""What would silently leave experts out, or compute with none, is an error."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from runtime.errors import CheckpointError
from runtime.hf.adapters.base import MissingParameter
from runtime.hf.layers import find_moe_layers
from runtime.store.weight_plan import FusedParameter
from tests.builders.families.build import save_family
from tests.builders.models import tiny_qwen2_moe
from tests.builders.served import serving


@torch.no_grad()
def logits(model, num_tokens):
    return model(torch.arange(num_tokens).reshape(1, num_tokens) % 64).logits


def test_absent__every_computation_with_it_is_refused():
    absent = MissingParameter(FusedParameter("layer.experts", "w", (4, 2, 3), torch.float32))
    for computation in (
        lambda: absent[0],
        lambda: F.linear(torch.ones(1, 3), absent),
        lambda: torch.ones(2, 3) @ absent,
        lambda: absent.transpose(1, 2),
    ):
        with pytest.raises(CheckpointError, match=r"layer\.experts\.w is served"):
            computation()
    assert not hasattr(absent, "data_ptr")
    assert (absent.shape, absent.dtype) == ((4, 2, 3), torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_interface__another_implementation_raises_an_error(tmp_path, implementation, num_tokens):
    with serving(tiny_qwen2_moe(tmp_path / "model", top_k=1)) as model:
        expected = logits(model, num_tokens)
        model.set_experts_implementation(implementation)
        with pytest.raises(CheckpointError, match="experts_implementation='moecast'"):
            logits(model, num_tokens)
        model.set_experts_implementation("moecast")
        assert torch.equal(logits(model, num_tokens), expected)


def test_interface__the_models_own_loop_fetches_too(folder):
    """`eager` set by the user: slower, because it does not reorder, and the same bits."""
    with serving(folder, budget="25%") as model:
        expected = logits(model, 9)
        model.set_experts_implementation("eager")
        for _ in range(3):
            assert torch.equal(logits(model, 9), expected)


SAVED = ["qwen2_moe", "dbrx", "jetmoe", "llama4", "step3p7", "switch_transformers"]


@pytest.mark.parametrize("name", SAVED)
def test_guard__saving_without_experts_are_refused(tmp_path, name):
    with serving(save_family(tmp_path / "model", name), budget="100%") as model:
        for part in (model, find_moe_layers(model)[0].block):
            with pytest.raises(CheckpointError, match="state_dict"):
                part.state_dict()
            for copy_one in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(CheckpointError, match="copy or pickle"):
                    copy_one(part)
        with pytest.raises(CheckpointError, match="save_pretrained"):
            model.save_pretrained(tmp_path / "saved")
        assert model.get_input_embeddings().state_dict()
        assert not (tmp_path / "saved").exists()


CONVERSIONS = [
    (lambda model: model.half(), r"stays in torch.float32.*dtype= to load \(auto, float32"),
    (lambda model: model.type(torch.float16), "dtype= to load"),
    (lambda model: model.to("cpu", torch.bfloat16), "dtype= to load"),
    (lambda model: model.to(torch.ones(1, dtype=torch.float16)), "dtype= to load"),
    (lambda model: model.to("meta"), r"stays on cpu.*device='meta'"),
    (lambda model: model.model.half(), "dtype= to load"),
]


@pytest.mark.parametrize(("convert", "message"), CONVERSIONS)
def test_guard__conversions_after_loading_are_refused(folder, convert, message):
    with serving(folder) as model:
        expected = logits(model, 9)
        with pytest.raises(CheckpointError, match=message):
            convert(model)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert torch.equal(logits(model, 9), expected)


def test_guard__conversions_to_what_the_model_has_return_it(folder):
    with serving(folder) as model:
        assert model.to("cpu") is model.cpu() is model.float() is model.to(torch.float32) is model
        assert model.to(device="cpu", dtype=torch.float32) is model.type(torch.float32) is model
        assert model.eval().train().eval() is model
