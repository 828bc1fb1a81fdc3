"""Experts that are computed together: bitwise Transformers' `grouped_mm`, whatever is cached."""

import threading
from functools import partial

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from runtime.config import Exact, SystemConfig
from runtime.errors import CheckpointError, TransferError
from runtime.hf import grouped
from runtime.hf.grouped import GROUPED_MM, GroupedLaunches, choose_exact, set_reference
from runtime.hf.loading import load_plain
from runtime.store.packed.coding import HQQ, Coding
from tests.builders import lockstep
from tests.builders.families.build import save_family
from tests.builders.gguf_files import gguf_file
from tests.builders.packed import packed
from tests.builders.served import before_transfers, count_pins, serve, serve_with_transfers, serving

TOKENS = torch.randint(4, 60, (2, 17), generator=torch.Generator().manual_seed(3))
EIGHT = {"max_new_tokens": 8}


serve_grouped = partial(serve, exact=Exact.GROUPED)
serving_grouped = partial(serving, exact=Exact.GROUPED)


def load_grouped(folder):
    """Returns the reference: all experts in memory."""
    plain = load_plain(folder, dtype="auto")
    assert set_reference(plain, Exact.GROUPED) is Exact.GROUPED
    return plain


@torch.no_grad()
def answer(model):
    """Returns logits of a prefill of several rows, and of the greedy tokens of one row."""
    return [model(TOKENS).logits, lockstep.answer(model, TOKENS[:1], **EIGHT)]


MODELS = [("mixtral", torch.float32), ("gpt_oss", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_grouped__every_bit_is_the_librarys_whatever_is_cached(tmp_path, name, dtype):
    """gpt_oss has transposed matrices, biases and another gate."""
    folder = save_family(tmp_path, name, dtype=dtype)
    expected = answer(load_grouped(folder))
    for options in (
        {"budget": "100%"},
        {"budget": "25%"},
        {"budget": "50%", "system": SystemConfig(early_preemption=False, reordered=False)},
        {"budget": "40%", "host_budget": "80%", "predictor": "skip"},
    ):
        with serving_grouped(folder, **options) as model:
            for _ in range(2):
                assert all(map(torch.equal, answer(model), expected)), options


def test_grouped__differs_from_the_eager_loop(tmp_path):
    """Otherwise the test above would pass with the eager path."""
    folder = save_family(tmp_path, "mixtral", dtype=torch.bfloat16)
    with serving(folder) as model:
        assert not torch.equal(answer(model)[0], answer(load_grouped(folder))[0])


def test_grouped__what_is_ready_is_computed_together(folder):
    model = serve_grouped(folder, budget="100%", system="on-demand")
    engine = model.moecast.engine
    deliveries, ready_slots = [], engine.ready_slots

    def counted(layer, wanted):
        for slots in ready_slots(layer, wanted):
            deliveries.append(len(slots) / len(wanted))
            yield slots

    engine.ready_slots = counted
    with model.moecast, torch.no_grad():
        model(TOKENS)
        assert min(deliveries) < 1
        deliveries.clear()
        model(TOKENS)
    assert deliveries == [1, 1, 1]


def test_grouped__ids_beyond_the_last_expert_add_nothing(folder):
    """As in the library where it knows such ids: with expert parallelism."""
    module = load_grouped(folder).model.layers[0].mlp.experts
    module._is_expert_parallel = True
    hidden_TD = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    experts_TK = torch.tensor([[0, 12], [12, 3], [12, 12], [3, 1], [11, 12]])
    weights_TK = torch.rand(5, 2).masked_fill(experts_TK == 12, 0)
    with torch.no_grad(), serve_grouped(folder).moecast as handle:
        served = handle.layers[0].experts
        expected = ALL_EXPERTS_FUNCTIONS[GROUPED_MM](module, hidden_TD, experts_TK, weights_TK)
        assert torch.equal(served(hidden_TD, experts_TK, weights_TK), expected)
        assert torch.equal(served(hidden_TD, torch.full((5, 2), 12), weights_TK), hidden_TD * 0)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_grouped__a_failed_read_ends_one_request_and_changes_no_bit(folder, monkeypatch, on_gpu):
    if on_gpu:
        monkeypatch.setattr(grouped, "GroupedExperts", GroupedLaunches)
    expected, broken = answer(load_grouped(folder)), threading.Event()

    def fail(_task):
        if broken.is_set():
            raise TransferError("a broken link")

    options = {"exact": Exact.GROUPED, "budget": "40%", "system": "on-demand"}
    model = serve_with_transfers(folder, monkeypatch, before_transfers(fail), **options)
    with model.moecast as handle:
        for _ in range(2):
            assert all(map(torch.equal, answer(model), expected))
            broken.set()
            with pytest.raises(TransferError, match="a broken link"):
                answer(model)
            broken.clear()
            assert count_pins(handle.engine) == 0


@pytest.mark.parametrize("budget", ["30%", "100%"])
def test_grouped__sequences_in_lockstep_are_bitwise_alone(folder, budget):
    plain = load_grouped(folder)
    prompts = [TOKENS[:1, :length] for length in (5, 1, 17, 9)]
    expected = [lockstep.answer(plain, tokens, **EIGHT) for tokens in prompts]
    with serving_grouped(folder, budget=budget) as model:
        lockstep.assert_equal(lockstep.answer_together(model, prompts, **EIGHT), expected)


@pytest.mark.parametrize(("budget", "max_groups"), [("25%", 3), ("100%", 1023)])
def test_launches__are_the_librarys_own_over_the_arena(tmp_path, monkeypatch, budget, max_groups):
    """What a GPU runs. It runs on a CPU too, where the place of a row may change its last bits."""
    monkeypatch.setattr(grouped, "GroupedExperts", GroupedLaunches)
    monkeypatch.setattr(grouped, "MAX_GROUPS", max_groups)
    groups, grouped_mm = [], ALL_EXPERTS_FUNCTIONS[GROUPED_MM]

    def counted(module, *args):
        groups.append(module.num_experts)
        return grouped_mm(module, *args)

    for name in ("qwen2_moe", "gpt_oss"):
        folder = save_family(tmp_path / name, name)
        expected = answer(load_grouped(folder))
        with serving_grouped(folder, budget=budget) as model, monkeypatch.context() as counting:
            counting.setitem(ALL_EXPERTS_FUNCTIONS, GROUPED_MM, counted)
            answers = answer(model)
        torch.testing.assert_close(answers, expected, rtol=1e-5, atol=2e-6)
    assert max(groups) <= max_groups


CHOICES = [
    (Exact.AUTO, "cpu", None, Exact.EAGER),
    (Exact.AUTO, "cuda", None, Exact.GROUPED),
    (Exact.AUTO, "cuda", "a reason", Exact.EAGER),
    (Exact.GROUPED, "cpu", None, Exact.GROUPED),
]


@pytest.mark.parametrize(("wanted", "device", "obstacle", "expected"), CHOICES)
def test_choose__auto_groups_on_gpus_only_where_it_can(wanted, device, obstacle, expected):
    assert choose_exact(wanted, torch.device(device), obstacle) is expected


def test_grouped__models_with_their_own_code_are_refused_before_a_byte_is_read(tmp_path):
    folder = save_family(tmp_path, "llama4")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])  # reading it would be another error
    with pytest.raises(CheckpointError, match=r"model\.exact=grouped: .*experts \(Llama4.*eager"):
        serve_grouped(folder)


PLACES = [("devices", "cpu,cpu", "several devices"), ("expert_parallel", True, "several processes")]


@pytest.mark.parametrize(("option", "value", "reason"), PLACES)
def test_grouped__experts_in_several_places_are_refused(folder, option, value, reason):
    with pytest.raises(CheckpointError, match=rf"model\.exact=grouped: .*{reason}"):
        serve_grouped(folder, **{option: value})


def test_grouped__quantised_experts_are_refused_and_packed_ones_are_not(tmp_path, folder):
    store = packed(folder, tmp_path / "hqq", coding=Coding(HQQ, 16, 8))
    with pytest.raises(CheckpointError, match=r"model\.exact=grouped: experts are hqq in memory"):
        serve_grouped(folder, store=store)
    with pytest.raises(CheckpointError, match=r"model\.exact=grouped: .*quantised"):
        serve_grouped(gguf_file("qwen2moe-Q8_0"))
    expected = answer(load_grouped(folder))
    with serving_grouped(folder, store=packed(folder, tmp_path / "raw"), budget="40%") as model:
        assert all(map(torch.equal, answer(model), expected))
