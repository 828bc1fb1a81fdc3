"""Output is bitwise that of plain Transformers eager, whatever is cached."""

import pytest
import torch

import runtime
from runtime.config import ModelConfig, SystemConfig
from tests.builders.models import plain_eager, tiny_qwen2_moe


def serve(folder, **kwargs):
    return runtime.load(ModelConfig(name="tiny", id=str(folder)), **kwargs)


@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.float32, "15%"), (torch.bfloat16, "50%"), (torch.float32, "100%")]
)
def test_load__logits_are_bitwise_those_of_eager(tmp_path, dtype, budget):
    folder = tiny_qwen2_moe(tmp_path / "model", dtype=dtype)
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain_eager(folder)(tokens).logits
        model = serve(folder, budget=budget)
        with model.moecast:
            for _ in range(3):
                assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("switch", ["chunked", "early_preemption", "reordered", "per_layer"])
def test_load__every_technique_off_changes_no_token(tmp_path, switch):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3)
    tokens = torch.randint(0, 64, (1, 5), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = plain_eager(folder).generate(tokens, **options)
    model = serve(folder, budget="25%", system=SystemConfig(**{switch: False}))
    with model.moecast:
        assert torch.equal(model.generate(tokens, **options), expected)
        assert model.moecast.stats()["misses"] > 0


@pytest.mark.parametrize("host_budget", [None, "50%"])
def test_load__begins_with_the_first_layers(tmp_path, host_budget):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=4)
    system = SystemConfig(fill_first_layers=True, per_layer=False)
    model = serve(folder, budget="25%", host_budget=host_budget, system=system)
    with model.moecast as handle:
        cache, num_experts = handle.engine.cache, handle.spec.num_experts
        order = [(layer, e) for layer in range(4) for e in range(num_experts)]
        held = [sorted(tier.cache) for tier in cache.tiers]
        assert [expert for experts in held for expert in experts] == order[: sum(map(len, held))]
        assert list(map(len, held)) == [tier.cache.num_slots for tier in cache.tiers]
        assert all(cache.is_ready(expert) for expert in held[0])
        assert handle.stats()["bytes_moved"] == 0, "counted from the first request on"
        tokens = torch.arange(5)[None]
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, plain_eager(folder)(tokens).logits)


def test_load__cast_of_the_checkpoint_is_the_librarys(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", dtype=torch.bfloat16)
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        expected = plain_eager(folder, dtype=torch.float32)(tokens).logits
        model = serve(folder, dtype="float32")
        with model.moecast:
            assert torch.equal(model(tokens).logits, expected)
            assert model.moecast.spec.dtype == "float32"
