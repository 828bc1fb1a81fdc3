"""Rings of stores and of threads: a transfer ends with the store's bytes or with its error."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.policy.tier import TransferTask
from runtime.store.base import ExpertStore, allocate_aligned
from runtime.store.packed.store import open_store
from runtime.transfer.arrivals import QueuedArrivals, rings
from runtime.transfer.file_ring import StoreRing
from runtime.transfer.link import Arena
from runtime.transfer.ring import ARRIVED
from tests.builders.models import tiny_qwen2_moe
from tests.builders.packed import packed, source_of

WAIT_SECONDS = 240.0
COMPILED = pytest.mark.skipif(rings is None, reason="no C compiler")
ARRIVALS = [
    pytest.param(QueuedArrivals, id="python"),
    pytest.param(rings and rings.Arrivals, id="compiled", marks=COMPILED),
]


def task(expert: tuple[int, int], slot: int, chunks: range, *, high: bool = True) -> TransferTask:
    return TransferTask(expert, slot, chunks.start, chunks.stop, 1, high, None)


def settled(ring, arrivals, count: int) -> dict[int, int]:
    """Status of each of so many tickets, once they have ended, as an engine does it."""
    ended: dict[int, int] = {}
    while len(ended) < count:
        assert arrivals.wait(WAIT_SECONDS)
        for ticket, status, seconds in arrivals.take():
            assert seconds >= 0
            if ring.settle(ticket, status):
                assert ticket not in ended
                ended[ticket] = status
    return ended


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Parts of 16 KiB and 64 KiB."""
    folder = tmp_path_factory.mktemp("rings") / "model"
    return tiny_qwen2_moe(folder, hidden_size=128, expert_width=128, num_experts=6)


@pytest.fixture(params=["packed", "checkpoint", "converted"])
def open_kind(request, tmp_path, model) -> Callable[..., ExpertStore]:
    if request.param == "packed":
        folder = packed(model, tmp_path / "store")
        return lambda: open_store(folder, None)
    dtype = "auto" if request.param == "checkpoint" else "bfloat16"
    return lambda: source_of(model, dtype=dtype)[0]


@pytest.mark.parametrize("kind", ARRIVALS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_store_ring__fills_slots_as_the_store_does(open_kind, kind, num_threads):
    store, arrivals = open_kind(), kind()
    arena = Arena(store.layouts, 12)
    ring = StoreRing(arrivals, store, arena, num_threads=num_threads)
    expected = [allocate_aligned(store.layouts[0].num_bytes).zero_() for _ in range(12)]
    for slot in range(12):
        arena.slot(slot).zero_()
    tickets = 0
    for layer in range(2):
        for expert in range(6):
            slot = 6 * layer + expert
            chunks = range(expert % 2, len(store.layouts[layer].chunks) - (expert == 4))
            store.read(layer, expert, chunks, expected[slot])
            ring.submit(tickets, task((layer, expert), slot, chunks, high=expert > 3))
            tickets += 1
    assert settled(ring, arrivals, tickets) == dict.fromkeys(range(tickets), ARRIVED)
    for slot in range(12):
        assert torch.equal(arena.slot(slot), expected[slot])
    assert ring.running() == []
    assert ring.errors == {}
    assert ring.close(WAIT_SECONDS)
