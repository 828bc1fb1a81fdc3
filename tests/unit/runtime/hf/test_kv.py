"""What a cache takes is what its tensors take, at any length."""

import pytest
import torch

from runtime.hf.kv import CacheSize, count_cache_bytes, estimate_cache_bytes, measure_cache_size
from tests.builders.families.build import tiny_model

LENGTH = 40


FAMILIES = ["qwen2_moe", "deepseek_v3", "granitemoe", "glm_moe_dsa", "qwen3_next"]


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_size__measured_and_estimated_is_what_the_cache_takes(name):
    """States of linear attention are the same at any length; the estimate may be more there."""
    model, keeps_states = tiny_model(name), name == "qwen3_next"
    tokens = torch.ones(1, LENGTH, dtype=torch.int64)
    taken = count_cache_bytes(model(tokens, use_cache=True).past_key_values)
    size = measure_cache_size(model)
    assert (size.bytes_fixed > 0) == keeps_states
    assert size.bytes_per_token > 0
    assert size.of(LENGTH) == taken
    estimate = estimate_cache_bytes(model.config, LENGTH, model.dtype)
    assert estimate >= taken if keeps_states else estimate == taken


@pytest.mark.parametrize("name", ["switch_transformers", "nllb_moe"])
def test_size__with_an_encoder_is_estimated_as_no_less(name):
    model, prompt = tiny_model(name), torch.ones(1, LENGTH, dtype=torch.int64)
    answer = model.generate(prompt, max_new_tokens=7, return_dict_in_generate=True)
    caches = vars(answer.past_key_values).values()
    taken = sum(count_cache_bytes(cache) for cache in caches)
    assert 0 < taken <= measure_cache_size(model).of(LENGTH + 7)


@pytest.mark.parametrize("rows", [1, 3])
def test_grown__counts_by_row(rows):
    of = {"num_steps": 4, "num_rows": rows}
    found = CacheSize.grown(rows * (100 + 8 * 10), rows * (100 + 12 * 10), num_tokens=12, **of)
    assert found == CacheSize(10, 100)
    assert CacheSize.grown(rows * 640, rows * 640, num_tokens=99, **of) == CacheSize(0, 640)
