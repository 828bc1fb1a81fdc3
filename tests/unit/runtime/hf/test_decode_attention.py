"""Attention of one token in float32: more exact, for marked modules only."""

import pytest
import torch
from transformers import Qwen2MoeForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from runtime.hf.decode_attention import MARK, attend, attend_in_float32
from tests.builders.models import tiny_qwen2_moe


class Attention(torch.nn.Module):
    num_key_value_groups = 2
    is_causal = True


def make_inputs(num_queries, num_tokens=9):
    torch.manual_seed(0)
    shapes = [(1, 4, num_queries, 16), (1, 2, num_tokens, 16), (1, 2, num_tokens, 16)]
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]


def exact(module, inputs, mask):
    return sdpa_attention_forward(module, *(x.double() for x in inputs), mask)[0]


@pytest.mark.parametrize("has_mask", [False, True])
def test_attend__one_token_is_rounded_once(has_mask):
    module = Attention()
    setattr(module, MARK, True)
    inputs = make_inputs(1)
    mask = torch.zeros(1, 1, 1, 9, dtype=torch.bfloat16) if has_mask else None
    if mask is not None:
        mask[..., :4] = float("-inf")
    found, weights = attend(module, *inputs, mask)
    assert weights is None
    assert found.dtype is torch.bfloat16
    expected = exact(module, inputs, None if mask is None else mask.double())
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize(("num_queries", "is_marked"), [(1, False), (5, True)])
def test_attend__otherwise_is_the_librarys(num_queries, is_marked):
    module = Attention()
    setattr(module, MARK, is_marked)
    inputs = make_inputs(num_queries)
    found, _ = attend(module, *inputs, None)
    assert torch.equal(found, sdpa_attention_forward(module, *inputs, None)[0])


def test_model__only_a_marked_one_computes_in_float32(tmp_path, monkeypatch):
    folder = tiny_qwen2_moe(tmp_path / "model", dtype=torch.bfloat16)
    plain, served = (Qwen2MoeForCausalLM.from_pretrained(folder) for _ in range(2))
    attend_in_float32(served)
    dtypes = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query, *args, **kwargs):
        dtypes.append(query.dtype)
        return attention(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for model, dtype in ((plain, torch.bfloat16), (served, torch.float32)):
        with torch.no_grad():
            past = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
            assert set(dtypes) == {torch.bfloat16}
            dtypes.clear()
            model(torch.tensor([[8]]), past_key_values=past, use_cache=True)
        assert set(dtypes) == {dtype}
        dtypes.clear()
