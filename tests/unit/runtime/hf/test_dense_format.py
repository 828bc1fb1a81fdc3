"""Linear layers outside of the experts as integers: which, with which result, and when refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import runtime
from predictors.errors import MoecastError
from runtime.config import DenseFormat, ModelConfig
from runtime.hf.dense_format import QuantisedLinear, apply_dense_format
from runtime.hf.layers import find_moe_layers
from runtime.hf.loading import count_weight_bytes, load_stripped
from runtime.store.ggml import library
from runtime.store.ggml.library import find_products
from tests.builders.families.build import tiny_model

pytestmark = pytest.mark.skipif(find_products() is None, reason="NO GGML LIBRARY")


def make_linear(shape, *, dtype=torch.bfloat16):
    torch.manual_seed(shape[0])
    return nn.Linear(shape[1], shape[0], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.015), ("Q4_0", 0.1)])
@pytest.mark.parametrize("shape", [(16, 32), (80, 64), (976, 256)])
def test_linear__is_the_product_with_rounded_weights(shape, kind, error, dtype):
    linear = make_linear(shape, dtype=dtype)
    quantised = QuantisedLinear(linear, kind)
    x = torch.randn(2, 3, shape[1], dtype=dtype)
    with torch.no_grad():
        found, expected = quantised(x), linear(x)
        with_own_weight = F.linear(x, quantised.weight, linear.bias)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert (found - expected).norm() < error * expected.norm()
    # What a module sees that looks at the weights is what is multiplied.
    assert (found - with_own_weight).float().norm() < 0.01 * expected.float().norm()


def test_linear__a_token_has_the_same_bits_in_every_batch():
    quantised = QuantisedLinear(make_linear((80, 64)), "Q4_0")
    x_TK = torch.randn(33, 64, dtype=torch.bfloat16)
    assert all(torch.equal(quantised(x_TK)[t], quantised(x_TK[t : t + 1])[0]) for t in (0, 7, 32))


def test_linear__takes_every_second_row():
    quantised = QuantisedLinear(make_linear((16, 32)), "Q8_0")
    x = torch.randn(6, 64, dtype=torch.bfloat16)
    assert torch.equal(quantised(x[::2, :32]), quantised(x[::2, :32].contiguous()))


def test_model__decoder_and_output_layer_are_integers_and_routers_are_not():
    model = tiny_model("qwen2_moe")
    before, layers = count_weight_bytes(model), find_moe_layers(model)
    routers = [layer.router for layer in layers]
    apply_dense_format(model, layers, DenseFormat.INT8)
    block = layers[0].block
    for linear in (block.self_attn.q_proj, block.mlp.shared_expert.up_proj, model.lm_head):
        assert isinstance(linear, QuantisedLinear)
    assert isinstance(block.mlp.shared_expert_gate, nn.Linear)  # one row
    assert [layer.router for layer in find_moe_layers(model)] == routers
    assert count_weight_bytes(model) < before
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False).shape == (1, 4)


@pytest.mark.parametrize("name", ["switch_transformers", "hy_v4", "gemma4", "mixtral"])
def test_model__families_that_look_at_weights_or_stride_inputs_compute(name):
    model, ids = tiny_model(name), torch.arange(5, 17)[None]
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        expected = model(input_ids=ids, **more).logits
        apply_dense_format(model, find_moe_layers(model), DenseFormat.INT8)
        found = model(input_ids=ids, **more).logits
    assert any(isinstance(module, QuantisedLinear) for module in model.modules())
    # Random routers are near ties: a token or two choose another expert.
    assert (found - expected).norm() < 0.5 * expected.norm()


def test_model__embeddings_tied_to_the_output_layer_stay():
    model = tiny_model("mixtral")
    model.lm_head.weight = model.model.embed_tokens.weight
    apply_dense_format(model, find_moe_layers(model), DenseFormat.INT8)
    assert isinstance(model.lm_head, QuantisedLinear)
    assert model.model.embed_tokens.weight.is_floating_point()


def test_load__makes_integers_only_if_asked(folder):
    for wanted in DenseFormat:
        config = ModelConfig(name="tiny", id=str(folder), dense_format=wanted)
        model = runtime.load(config, budget="50%", system="on-demand")
        with model.moecast:
            assert isinstance(model.lm_head, QuantisedLinear) == (wanted is not DenseFormat.OWN)


def test_load__is_refused_without_the_library(folder, monkeypatch):
    monkeypatch.setattr(library, "_open", lambda: (None, "libggml is away"))
    with pytest.raises(MoecastError, match=r"model\.dense_format=int4: libggml is away"):
        load_stripped(folder, "auto", dense_format=DenseFormat.INT4)
