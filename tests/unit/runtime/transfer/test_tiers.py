"""Disk -> host -> device: exact whatever the links do, and no slot written while it is in use."""

import threading
import time

import pytest
import torch

from runtime.config import SystemConfig
from runtime.errors import BudgetError, CheckpointError, Fault, TransferError
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.served import serve, serve_with_transfers

TOKENS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(3))
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("budgets", "dtype"),
    [
        (("15%", "15%"), torch.float32),
        (("25%", "50%"), torch.bfloat16),
        (("50%", "20%"), torch.float32),
    ],
)
def test_tiers__two_of_them_change_no_bit(tmp_path, budgets, dtype):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3, num_experts=12, dtype=dtype)
    plain = plain_eager(folder)
    model = serve(folder, budget=budgets[0], host_budget=budgets[1])
    with model.moecast, torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
        assert torch.equal(model.generate(TOKENS, **GREEDY), plain.generate(TOKENS, **GREEDY))
        stats = model.moecast.stats()
        disk = stats["lower_tiers"]["disk"]
        assert disk["requests"] == disk["hits"] + disk["misses"] + disk["joins"] > 0
        assert stats["bytes_moved"] > 0
        assert model.moecast.budget_bytes == sum(a.num_bytes for a in model.moecast.engine.arenas)


def test_tiers__a_window_of_host_layers_reads_ahead_and_changes_no_bit(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=6, num_experts=6)
    window = SystemConfig(
        eviction="first-layers", host_window=True, per_layer=False, drop_used=True
    )
    expected = plain_eager(folder).generate(TOKENS, **GREEDY)
    model = serve(folder, budget="30%", host_budget="50%", system=window)
    with model.moecast:
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected)
        lower = model.moecast.engine.cache.tiers[1]
        assert sum(counters.bytes_prefetched for counters in lower.counters) > 0


def test_tiers__the_lower_tier_saves_reads(folder):
    moved = {}
    for host_budget in ("20%", "100%"):
        model = serve(folder, budget="20%", host_budget=host_budget)
        with model.moecast:
            model.generate(TOKENS, **GREEDY)
            moved[host_budget] = model.moecast.stats()["lower_tiers"]["disk"]["bytes_moved"]
    spec = model.moecast.spec
    layout = model.moecast.engine.store.layouts[0]
    all_experts = spec.num_layers * spec.num_experts * sum(layout.chunk_bytes)
    assert moved["100%"] <= all_experts
    assert moved["100%"] < moved["20%"]


def test_load__each_budget_too_small_is_named(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model")
    with pytest.raises(BudgetError, match=r"host_budget of 1024 bytes.*host_budget=\d+"):
        serve(folder, budget="50%", host_budget="1KiB")
    with pytest.raises(BudgetError, match=r"^budget of 1024 bytes"):
        serve(folder, budget="1KiB", host_budget="50%")


def test_load__a_device_that_is_not_there_is_an_error(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model")
    with pytest.raises(CheckpointError, match="write auto, cpu, cuda"):
        serve(folder, device="gpu0")
    with pytest.raises(CheckpointError, match="cpu, cuda, xpu, mps only"):
        serve(folder, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(CheckpointError, match="sees no CUDA device"):
            serve(folder, device="cuda")


PROMPTLY = {"budget": "20%", "system": SystemConfig(watchdog_seconds=1.0)}


@pytest.mark.parametrize(("when", "host_budget"), [(1, None), (9, None), (2, "50%")])
def test_loop__a_transfer_whose_thread_dies_is_repeated(folder, monkeypatch, when, host_budget):
    expected = plain_eager(folder).generate(TOKENS, **GREEDY)

    def dying(_name, transfer):
        left = when

        def wrapped(task):
            nonlocal left
            left -= 1
            if left == 0:
                raise SystemExit
            transfer(task)

        return wrapped

    model = serve_with_transfers(folder, monkeypatch, dying, host_budget=host_budget, **PROMPTLY)
    with model.moecast as handle:
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected)
        assert handle.engine.loop.faults == {Fault.DIED: 1 if host_budget is None else 2}


class HangingReads:
    """Reads from the `when`-th on that hang until they are let go, then write rubbish.

    Args:
        num: Of such reads.
    """

    def __init__(self, transfer, when, num):
        self._transfer, self._when, self._end = transfer, when, when + num
        self.num_begun = 0
        self.let_go = threading.Event()

    def __call__(self, task):
        self.num_begun += 1
        if self._when <= self.num_begun < self._end and not self.let_go.is_set():
            assert self.let_go.wait(240)
            ring = self._transfer.__self__
            ring._arena.slot(task.slot).fill_(0x7F)
        else:
            self._transfer(task)


def serve_hanging(folder, monkeypatch, *, when, num, **kwargs):
    reads = []

    def wrap(_name, transfer):
        reads.append(HangingReads(transfer, when, num))
        return reads[0]

    return serve_with_transfers(folder, monkeypatch, wrap, **kwargs), reads[0]


@pytest.mark.parametrize("when", [1, 4])
def test_watchdog__sets_the_slot_of_a_hanging_transfer_aside(folder, monkeypatch, when):
    expected = plain_eager(folder).generate(TOKENS, **GREEDY)
    model, reads = serve_hanging(folder, monkeypatch, when=when, num=1, **PROMPTLY)
    engine = model.moecast.engine
    try:
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected)
        assert engine.report()["lost_threads"] == engine.cache.top.cache.num_quarantined == 1
        reads.let_go.set()
        while engine.report()["lost_threads"]:
            assert torch.equal(model.generate(TOKENS, **GREEDY), expected)
        assert engine.cache.top.cache.num_quarantined == 0
    finally:
        reads.let_go.set()
        model.moecast.close()


def test_watchdog__a_dead_disk_is_an_error_until_it_answers(folder, monkeypatch):
    expected = plain_eager(folder).generate(TOKENS, **GREEDY)
    model, reads = serve_hanging(
        folder,
        monkeypatch,
        when=1,
        num=1000,
        budget="60%",
        system=SystemConfig(watchdog_seconds=0.2),
    )
    try:
        for _ in range(2):
            with pytest.raises(TransferError, match="reads of experts have hung.*check the disk"):
                model.generate(TOKENS, **GREEDY)
        reads.let_go.set()
        while model.moecast.stats()["lost_threads"]:
            time.sleep(0.01)
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected)
    finally:
        reads.let_go.set()
        model.close()
