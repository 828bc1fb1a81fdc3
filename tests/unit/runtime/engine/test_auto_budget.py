"""`budget=auto`: all experts where they fit, else what free memory leaves, never more."""

from dataclasses import replace

import pytest
import torch

import runtime
from predictors.units import GIB, MIB
from runtime.config import ModelConfig, ServedConfig
from runtime.engine import auto_budget
from runtime.engine.auto_budget import PROCESS_BYTES, FreeMemory, choose_budget, measure_free_memory
from runtime.engine.loading import KV_TOKENS, KVReserve, count_draft_bytes, load_served
from runtime.errors import BudgetError
from runtime.hf.loading import count_weight_bytes
from runtime.policy.budget import SlotRequirements
from tests.builders.models import plain_eager

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]
NEEDS = SlotRequirements(experts={MIB: 100}, top_k=4, scratch_bytes=2 * MIB)


def free(available: int, **changes: int) -> FreeMemory:
    return FreeMemory(available=[available], weights=50 * MIB, **changes)


@pytest.mark.parametrize("available", [GIB, 100 * GIB])
def test_choose__is_all_experts_where_they_fit(available):
    chosen = choose_budget(NEEDS, free(available))
    assert (chosen.num_bytes, chosen.holds_all) == (102 * MIB, True)
    assert "102.0 MiB for experts, all of them" in chosen.describe()


def test_choose__leaves_room_for_everything_else():
    chosen = choose_budget(NEEDS, free(500 * MIB, kv_caches=20 * MIB))
    assert chosen.num_bytes == 450 * MIB - 50 * MIB - 20 * MIB - PROCESS_BYTES
    assert not chosen.holds_all
    assert chosen.describe() == (
        "budget=auto: 80.0 MiB for experts, 78 % of them (free: 500.0 MiB, less 10 %, 50.0 MiB for "
        "other weights, 20.0 MiB for KV caches, 300.0 MiB for the process)"
    )


def test_choose__too_little_memory_is_an_error_with_numbers():
    message = r"at least 6\.0 MiB, .*leaves 0 bytes .*free: 300\.0 MiB"
    with pytest.raises(BudgetError, match=message):
        choose_budget(NEEDS, free(300 * MIB))
    assert choose_budget(NEEDS, free(int((350 + 6) * MIB / 0.9) + 1)).num_bytes == 6 * MIB


def test_choose__of_a_shared_room_takes_its_share():
    chosen = choose_budget(NEEDS, free(500 * MIB), share=0.5)
    assert (chosen.num_bytes, chosen.free.room) == (50 * MIB, 100 * MIB)


def test_room__of_several_devices_is_decided_by_the_fullest():
    sizes = {"weights": 100 * MIB, "process": 0}
    even = FreeMemory(devices=GPUS, available=[1000 * MIB, 800 * MIB], **sizes)
    assert even.room == 2 * 720 * MIB, "the second: 90 % of 800 MiB, for half of the experts"
    first = FreeMemory(devices=GPUS, available=[400 * MIB, 800 * MIB], **sizes)
    assert first.room == 2 * 260 * MIB
    same = FreeMemory(devices=[torch.device("cpu")] * 2, available=[1000 * MIB] * 2, **sizes)
    assert same.room == 800 * MIB, "two arenas in the same memory"


def test_measure__asks_each_device(monkeypatch):
    sizes = {0: 5 * GIB, 1: 7 * GIB}
    monkeypatch.setattr(auto_budget, "read_free_memory", lambda device: sizes[device.index])
    assert measure_free_memory(GPUS) == [5 * GIB, 7 * GIB]
    monkeypatch.setattr(auto_budget, "available_memory_bytes", lambda: 6 * GIB)
    assert measure_free_memory([torch.device("cpu")], num_processes=3) == [2 * GIB]


def test_load__computes_its_budget_and_logs_it(folder, monkeypatch, caplog):
    with caplog.at_level("INFO"), runtime.load(folder, system="on-demand").moecast as handle:
        assert handle.stats()["arena_slots"] == 36
        assert handle.auto_budget.describe() in caplog.text
        others = handle.auto_budget.free.besides
    # Room for five experts.
    available = int((others + 5 * 6144) / auto_budget.USABLE_MEMORY_SHARE) + 1
    monkeypatch.setattr(auto_budget, "available_memory_bytes", lambda: available)
    with runtime.load(folder, system="on-demand").moecast as handle:
        assert 4 <= handle.stats()["arena_slots"] <= 5
    with runtime.load(folder, system="on-demand", budget=1.0).moecast as handle:
        assert handle.auto_budget is None
    monkeypatch.setattr(auto_budget, "available_memory_bytes", lambda: 100 * MIB)
    with pytest.raises(BudgetError, match="budget=auto: not enough free memory"):
        runtime.load(folder, system="on-demand")


KV_BYTES = KV_TOKENS * 3 * 2 * 2 * 8 * 4
"""3 layers, keys and values of 2 heads of 8 values of 4 bytes; a context of 32,768 tokens."""
RESERVES = [
    (KVReserve(), KV_BYTES),
    (KVReserve(num_sequences=8), 8 * KV_BYTES),
    (KVReserve(num_sequences=8, num_bytes=77), 77),
    (KVReserve(share=0.5), 0),
]


def read_free(folder, **options) -> FreeMemory:
    """Memory as it was when a model was loaded."""
    config = ServedConfig(model=ModelConfig(name="tiny", id=str(folder)), device="cpu")
    with load_served(config, budget="auto", **options).moecast as handle:
        return handle.auto_budget.free


@pytest.mark.parametrize(("reserve", "expected"), RESERVES)
def test_load__leaves_room_for_kv_caches(folder, reserve, expected):
    assert read_free(folder, kv_reserve=reserve).kv_caches == expected


def test_load__leaves_room_for_a_draft_model(folder):
    draft = plain_eager(folder)
    free = read_free(folder, draft_model=draft)
    # Its weights are in the same memory already, and missing in what is free.
    assert (free.draft, free.kv_caches) == (KV_BYTES, KV_BYTES)
    assert free.besides - replace(free, draft=0).besides == KV_BYTES
    weights = sum(parameter.nbytes for parameter in draft.parameters())
    on_gpu = count_draft_bytes(draft, torch.device("cuda")) - KV_BYTES
    assert weights <= on_gpu == count_weight_bytes(draft)


def test_load__a_second_tier_on_the_cpu_is_not_free(folder):
    with runtime.load(folder, system="on-demand", host_budget="50%").moecast as handle:
        assert handle.auto_budget.free.host_tier == 18 * 6144
