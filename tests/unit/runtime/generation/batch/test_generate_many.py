"""Many prompts in groups: every batch has the tokens, and the logits, that it has alone."""

import random
import re
from dataclasses import replace
from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from runtime.config import StoreConfig, SystemConfig
from runtime.errors import CheckpointError, PlanError, StepMemoryError, TransferError
from runtime.generation import kv_caches
from runtime.generation.batch import cost_profile
from runtime.generation.batch.dense_placement import stream_dense_weights
from runtime.generation.batch.generate_many import generate_batch, generate_many, run_micro_batches
from runtime.generation.batch.group_planner import PlannerCosts
from runtime.generation.batch.prompts import BatchPrompt, make_batches
from runtime.generation.config import Offload
from runtime.generation.kv_offload import KVCacheManager
from runtime.hf.kv import CacheSize
from runtime.hf.loading import load_plain
from runtime.presets import load_system
from tests.builders.families.build import save_family, tiny_model
from tests.builders.models import plain_eager
from tests.builders.served import serving

KLOTSKI = load_system("klotski")


def prompts_of(count, *, seed=0):
    drawn = random.Random(seed)
    tokens = [[drawn.randrange(2, 60) for _ in range(drawn.randrange(3, 14))] for _ in range(count)]
    return [BatchPrompt(i, tuple(one), 1 + i % 6) for i, one in enumerate(tokens)]


def record_logits(model):
    """Records every row of logits of a model; returns a function that ends it and returns them."""
    found = []
    hook = model.register_forward_hook(lambda *event: found.append(event[-1].logits.clone()))

    def taken():
        hook.remove()
        return sorted((one.shape, one.flatten().tolist()) for one in found)

    return taken


def alone(model, batches, caches=None, temperature=0.0, seed=0):
    found, taken, caches = {}, record_logits(model), caches or kv_caches.KVCacheFactory()

    def end(prompt, tokens, why):
        found[prompt.id] = tokens, why

    for place, batch in enumerate(batches):
        torch.manual_seed(seed * 1_000_003 + place)
        generate_batch(model, batch, caches=caches, ended=end, temperature=temperature)
    return found, taken()


def together(model, batches, *, n=3, caches=None, **options):
    results, taken, caches = [], record_logits(model), caches or kv_caches.KVCacheFactory()
    ran = run_micro_batches(model, batches, n=n, caches=caches, emit=results.append, **options)
    found = {one.id: (one.tokens, one.finish_reason) for one in results}
    assert len(found) == len(results)
    return found, taken(), ran


def served_together(folder, batches, **options):
    with serving(folder, budget="25%", system=KLOTSKI) as model:
        return together(model, batches, **options)


# Fused, one tensor per expert, a loop of the module's own, sliding windows, several kinds of cache,
# states that are no keys and values, an encoder; their dense weights are read layer by layer, those
# of the second dtype are in memory.
CASES = [
    *((name, "bfloat16") for name in (
        "qwen2_moe", "mixtral", "gpt_oss", "granitemoe", "llama4", "deepseek_v3", "olmoe",
        "qwen3_next", "switch_transformers",
    )),
    *((name, "float32") for name in ("gpt_oss", "llama4", "switch_transformers")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_run_batches__logits_are_bitwise_those_of_each_batch_alone(tmp_path, name, dtype):
    torch_dtype, batches = getattr(torch, dtype), make_batches(prompts_of(7), 2)
    source = save_family(tmp_path / "model", name, dtype=torch_dtype)
    expected = alone(load_plain(source, dtype=torch_dtype), batches)
    with serving(source, budget="60%", system=KLOTSKI, dtype=dtype) as model:
        if dtype == "bfloat16":
            stream_dense_weights(model, StoreConfig(), with_gates=True)
        found, logits, ran = together(model, batches)
    assert (found, logits) == expected
    assert not ran.failed
    assert ran.num_tokens == sum(len(tokens) for tokens, _ in found.values())


@pytest.mark.parametrize("n", [1, 5, 40])
def test_run_batches__n_changes_no_token_and_steps_are_shared(folder, n):
    batches = make_batches(prompts_of(11), 2)
    expected, _ = alone(plain_eager(folder), batches)
    found, _, ran = served_together(folder, batches, n=n)
    assert found == expected
    longest = [max(one.max_new_tokens for one in batch) for batch in batches]
    least, most = max(longest), sum(longest)
    assert least <= ran.num_steps <= most
    assert ran.num_steps == {1: most, 40: least}.get(n, ran.num_steps)


def test_run_batches__sampling_draws_by_batch(folder):
    batches = make_batches(prompts_of(9), 3)
    expected, _ = alone(plain_eager(folder), batches, temperature=0.9, seed=5)
    for n in (1, 3):
        found, *_ = served_together(folder, batches, n=n, temperature=0.9, seed=5)
        assert found == expected


def test_run_batches__rows_end_at_the_end_token_and_are_reported(folder):
    batches = [tuple(BatchPrompt(i, (5 + i, 9, 3 + i), 12) for i in range(4))]
    plain = plain_eager(folder)
    everything, _ = alone(plain, batches)
    end = everything[2][0][1]
    plain.generation_config.eos_token_id = [end]
    expected, _ = alone(plain, batches)
    assert {why for _, why in expected.values()} == {"stop", "length"}
    for tokens, why in expected.values():
        assert (end in tokens[:-1], tokens[-1] == end) == (False, why == "stop")
    with serving(folder, budget="25%") as model:
        model.generation_config.eos_token_id = [end]
        found, *_ = together(model, batches)
    assert found == expected


@pytest.mark.parametrize("layers_inside", [0, 5, 30])
def test_run_batches__caches_with_a_budget_change_no_bit(folder, layers_inside):
    batches = make_batches(prompts_of(9), 2)
    expected = alone(plain_eager(folder), batches)
    # 2 rows, 2 heads of 8, keys and values, float32; 13 + 6 tokens at most.
    budget = (3 + layers_inside) * 2 * 2 * 8 * 2 * 4 * 19
    with serving(folder, budget="25%", system=KLOTSKI) as model:
        room = KVCacheManager(budget, kv_caches.make_offload_factory(Offload.DISK, model.device))
        caches = kv_caches.budgeted_caches(model, room)
        found, logits, _ = together(model, batches, caches=caches)
    caches.close()
    assert (found, logits) == expected
    assert (room.num_read > 0) == (layers_inside < 9)
    assert room.peak_bytes <= budget
    assert room.admitted_bytes == 0


def test_run_batches__a_window_that_holds_all_changes_no_token(folder):
    batches, plain = make_batches(prompts_of(9), 2), plain_eager(folder)
    expected, _ = alone(plain, batches)
    wide, _ = alone(plain, batches, caches=kv_caches.sink_caches(plain, sinks=2, window=30))
    assert wide == expected
    narrow = kv_caches.sink_caches(plain, sinks=2, window=4)
    expected_narrow, _ = alone(plain, batches, caches=narrow)
    assert expected_narrow != expected
    found, *_ = served_together(folder, batches, caches=narrow)
    assert found == expected_narrow


def test_sinks__attention_is_to_the_first_tokens_and_the_last_only(folder):
    """A prompt, then tokens one by one: as plain attention with a mask that hides the others."""
    sinks, window = 2, 5
    plain = plain_eager(folder)
    tokens = torch.randint(1, 60, (1, 16), generator=torch.Generator().manual_seed(1))
    caches = kv_caches.sink_caches(plain, sinks=sinks, window=window)
    cache = caches.make(torch.zeros(1, dtype=torch.long), max_cache_length=16)
    with torch.no_grad():
        plain(tokens[:, :9], past_key_values=cache)
        for at in range(9, 16):
            found = plain(tokens[:, at : at + 1], past_key_values=cache).logits[:, -1]
            mask = torch.full((1, 1, at + 1, at + 1), float("-inf")).triu(1)
            for query in range(9, at + 1):
                mask[..., query, sinks : max(sinks, query - window)] = float("-inf")
            expected = plain(tokens[:, : at + 1], attention_mask=mask).logits[:, -1]
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_budgeted__is_refused_where_layers_keep_something_else(tmp_path, name):
    with serving(save_family(tmp_path / "model", name), budget="100%") as model:
        with pytest.raises(PlanError, match=r"kv_budget: .* leave kv_budget out"):
            kv_caches.budgeted_caches(model, KVCacheManager(None, None))
        with pytest.raises(PlanError, match=r"window: .* leave window out"):
            kv_caches.sink_caches(model, sinks=1, window=3)


def test_generate_many__gives_results_in_the_order_of_the_prompts(folder):
    prompts = prompts_of(8, seed=3)
    batches = make_batches([BatchPrompt(i, one.tokens, 5) for i, one in enumerate(prompts)], 3)
    expected, _ = alone(plain_eager(folder), batches)
    ids, results = [list(one.tokens) for one in prompts], []
    options = {"batch_size": 3, "max_new_tokens": 5}
    with serving(folder, budget="25%", system=KLOTSKI) as model:
        found = model.generate_many(ids, n=2, on_result=results.append, **options)
        assert model.generate_many([]) == []
        assert model.generate_many(ids, n=3, dense="stream", **options) == found
        assert model.moecast.dense_stream is None
    assert [one.id for one in found] == sorted(one.id for one in results) == list(range(8))
    assert {one.id: (one.tokens, one.finish_reason) for one in found} == expected
    assert {one.text for one in found} == {None}


def test_generate_many__plans_by_itself(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("MOECAST_CACHE", str(tmp_path))
    with serving(folder, budget="25%", system=KLOTSKI) as model:
        prompts = [list(one.tokens) for one in prompts_of(8)]
        found = generate_many(model, prompts, batch_size=2, max_new_tokens=3, kv_budget="1MiB")
        (known,) = (tmp_path / "measured").iterdir()
        written = known.stat().st_mtime_ns
        assert generate_many(model, prompts, batch_size=2, max_new_tokens=3) == found
    assert known.stat().st_mtime_ns == written


def test_generate_many__plans_for_a_model_with_an_encoder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOECAST_CACHE", str(tmp_path / "cache"))
    folder = save_family(tmp_path / "model", "switch_transformers")
    prompts = [list(one.tokens) for one in prompts_of(5)]
    with serving(folder, budget="25%", system=KLOTSKI) as model:
        expected = generate_many(model, prompts, n=1, batch_size=2)
        assert generate_many(model, prompts, batch_size=2) == expected


def test_costs__are_known_for_the_same_kernels_only(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("MOECAST_CACHE", str(tmp_path))
    costs = PlannerCosts(**dict.fromkeys(PlannerCosts.__dataclass_fields__, 0.0))
    measured = cost_profile.CostProfile(costs, CacheSize(0, 0))
    monkeypatch.setattr(cost_profile, "measure_costs", lambda *_: measured)
    (batch,) = make_batches(prompts_of(2), 2)
    kernels = {"dense_format": "int8", "exact": "grouped", "decode_kernels": "own"}
    with serving(folder, budget="100%") as model:
        own = model.moecast.config
        others = [replace(own, **{key: value}) for key, value in kernels.items()]
        for config in (own, *others, replace(own, decode_threads=1)):
            model.moecast.config = config
            for is_known in (False, True):
                found = cost_profile.load_or_measure(model, batch, store=StoreConfig())
                assert found.was_known == is_known


def fail_second(function, error):
    return Mock(wraps=function, side_effect=chain([DEFAULT, error], repeat(DEFAULT)))


def fail_cache(_model):
    """The second batch's cache cannot be written."""
    caches = kv_caches.KVCacheFactory()
    caches.make = fail_second(caches.make, TransferError("the disk is full"))
    return caches


def fail_forward(model):
    """In the second forward pass, memory ends."""
    error = torch.OutOfMemoryError("out of memory")
    model.lm_head.forward = fail_second(model.lm_head.forward, error)
    return kv_caches.KVCacheFactory()


FAILURES = [
    (fail_cache, TransferError, "the disk is full"),
    (fail_forward, StepMemoryError, "out of memory on cpu: a step of .* tokens"),
]


@pytest.mark.parametrize(("fail", "kind", "message"), FAILURES)
def test_run_batches__lack_of_disk_or_memory_drops_only_its_batch(folder, fail, kind, message):
    batches = make_batches(prompts_of(9), 3)
    expected, _ = alone(plain_eager(folder), batches)
    with serving(folder, budget="40%", system=SystemConfig(prefetch=False)) as model:
        found, _, ran = together(model, batches, caches=fail(model))
        ((batch, error),) = ran.failed
        assert (type(error), batch) == (kind, batches[1])
        assert re.match(message, str(error))
        missing = {one.id for one in batch}
        assert found == {own: value for own, value in expected.items() if own not in missing}
        # The model is as good as before.
        again, *_ = together(model, batches)
        assert again == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [("diffusion_gemma", "token by token"), ("openai_privacy_filter", "generates nothing")],
)
def test_generate_many__models_without_steps_of_one_token_are_refused(name, message):
    with pytest.raises(CheckpointError, match=message):
        generate_many(tiny_model(name), [[5, 6]])


def test_generate_many__raises_what_has_failed(folder):
    with serving(folder, budget="40%") as model:
        fail_forward(model)
        with pytest.raises(StepMemoryError, match=r"^2 of 4 prompts failed: out of memory on cpu"):
            generate_many(model, [[5, 6], [7, 8], [9], [3]], n=2, batch_size=2, max_new_tokens=2)
