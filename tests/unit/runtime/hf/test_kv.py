"""What a cache takes is what its tensors take, at any length."""

import pytest
import torch

from runtime.hf.kv import CacheSize, count_cache_bytes, estimate_cache_bytes, measure_cache_size
from tests.builders.families.build import tiny_model

LENGTH = 40


def held(model, num_tokens: int) -> int:
    tokens = torch.ones(1, num_tokens, dtype=torch.int64)
    with torch.no_grad():
        return count_cache_bytes(model(tokens, use_cache=True).past_key_values)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "granitemoe", "qwen3_next"])
def test_cache__that_grows_with_each_token(name):
    """States of linear attention are the same at any length."""
    model = tiny_model(name)
    size = measure_cache_size(model)
    assert (size.bytes_fixed > 0) == (name == "qwen3_next")
    assert size.bytes_per_token > 0
    assert size.of(LENGTH) == held(model, LENGTH)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "glm_moe_dsa", "qwen3_next"])
def test_estimate__is_at_least_what_the_cache_takes(name):
    """More only where some layers keep a state."""
    model = tiny_model(name)
    estimate = estimate_cache_bytes(model.config, LENGTH, model.dtype)
    taken = held(model, LENGTH)
    assert estimate == taken if name != "qwen3_next" else estimate >= taken


@pytest.mark.parametrize("rows", [1, 3])
def test_grown__counts_by_row(rows):
    of = {"num_steps": 4, "num_rows": rows}
    found = CacheSize.grown(rows * (100 + 8 * 10), rows * (100 + 12 * 10), num_tokens=12, **of)
    assert found == CacheSize(10, 100)
    assert CacheSize.grown(rows * 640, rows * 640, num_tokens=99, **of) == CacheSize(0, 640)
