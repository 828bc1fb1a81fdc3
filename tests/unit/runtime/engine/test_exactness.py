"""Output is bitwise that of plain Transformers eager, whatever is cached."""

import pytest
import torch

from runtime.config import SystemConfig
from tests.builders.models import GREEDY, TOKENS, plain_eager, tiny_qwen2_moe
from tests.builders.served import serving

F32, BF16 = torch.float32, torch.bfloat16
MODELS = [
    *((F32, "auto", "15%", None), (BF16, "auto", "50%", None)),
    *((F32, "auto", "100%", None), (BF16, F32, "75%", None)),
    *((F32, "auto", "15%", "15%"), (BF16, "auto", "25%", "50%"), (F32, "auto", "50%", "20%")),
]


@pytest.mark.parametrize(("saved", "dtype", "budget", "host_budget"), MODELS)
def test_load__answers_are_bitwise_those_of_eager(tmp_path, saved, dtype, budget, host_budget):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3, num_experts=12, dtype=saved)
    plain, options = plain_eager(folder, dtype=dtype), {"budget": budget, "dtype": dtype}
    with serving(folder, host_budget=host_budget, **options) as model, torch.no_grad():
        handle, expected = model.moecast, plain(TOKENS).logits
        assert f"torch.{handle.spec.dtype}" == str(expected.dtype)
        for _ in range(3):
            assert torch.equal(model(TOKENS).logits, expected)
        assert torch.equal(model.generate(TOKENS, **GREEDY), plain.generate(TOKENS, **GREEDY))
        if host_budget is not None:
            disk = handle.stats()["lower_tiers"]["disk"]
            assert disk["requests"] == disk["hits"] + disk["misses"] + disk["joins"] > 0
            assert handle.stats()["bytes_moved"] > 0
            assert handle.budget_bytes == sum(arena.num_bytes for arena in handle.engine.arenas)


@pytest.mark.parametrize("host_budget", [None, "50%"])
def test_load__begins_with_the_first_layers(tmp_path, host_budget):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=4)
    system = SystemConfig(fill_first_layers=True, per_layer=False)
    with serving(folder, budget="25%", host_budget=host_budget, system=system) as model:
        cache, num_experts = model.moecast.engine.cache, model.moecast.spec.num_experts
        order = [(layer, e) for layer in range(4) for e in range(num_experts)]
        held = [sorted(tier.cache) for tier in cache.tiers]
        assert [expert for experts in held for expert in experts] == order[: sum(map(len, held))]
        assert list(map(len, held)) == [tier.cache.num_slots for tier in cache.tiers]
        assert all(cache.is_ready(expert) for expert in held[0])
        assert model.moecast.stats()["bytes_moved"] == 0, "counted from the first request on"
        with torch.no_grad():
            assert torch.equal(model(TOKENS).logits, plain_eager(folder)(TOKENS).logits)
