"""Ctrl-C in the middle of the bookkeeping: the next request finds it in order."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from runtime.config import SystemConfig
from runtime.errors import Fault
from runtime.transfer.ring import ARRIVED, DAMAGED
from tests.builders.held_ring import HeldRing
from tests.builders.models import TOKENS
from tests.builders.parts import WAIT_SECONDS
from tests.builders.patchable import use_patchable_core
from tests.builders.served import count_pins, serve_with_rings, serving


def interrupting(real, call):
    """The function, with KeyboardInterrupt when its n-th call has done its work."""
    numbers = itertools.count(1)

    def interrupted(*args, **kwargs):
        result = real(*args, **kwargs)
        if next(numbers) == call:
            raise KeyboardInterrupt
        return result

    return interrupted


METHODS = ("request", "next_task", "_start", "release", "complete", "queue.remove")
ENTRIES = [
    *(("request", {}), ("complete", {}), ("request", {"budget": "40%", "devices": ["cpu", "cpu"]})),
    *((name, {"host_budget": "40%"}) for name in METHODS),
]


@pytest.mark.parametrize(("name", "options"), ENTRIES)
def test_interrupt__between_two_entries_of_the_books_is_forgotten(
    folder, expected, monkeypatch, name, options
):
    use_patchable_core(monkeypatch)
    interrupts = 0
    with serving(folder, **{"budget": "25%", **options}) as model, torch.no_grad():
        for tier in model.moecast.engine.cache.tiers:
            owner, method = (tier.queue, "remove") if name == "queue.remove" else (tier, name)
            for call in range(1, 5):
                with monkeypatch.context() as patch:
                    patch.setattr(owner, method, interrupting(getattr(owner, method), call))
                    try:
                        model(TOKENS)
                    except KeyboardInterrupt:
                        interrupts += 1
                assert torch.equal(model(TOKENS).logits, expected[0])
        assert count_pins(model.moecast.engine) == 0
    assert interrupts > 0


def test_interrupt__before_a_step_gave_back_the_lock_leaves_it_to_other_threads(folder, expected):
    with serving(folder) as model, torch.no_grad(), ThreadPoolExecutor(1) as other:
        lock = model.moecast.engine._forward_lock
        lock.begin()  # a step whose end was cut short in its first call
        assert torch.equal(model(TOKENS).logits, expected[0])
        assert torch.equal(other.submit(lambda: model(TOKENS).logits).result(60), expected[0])


def raise_interrupt(*_):
    raise KeyboardInterrupt


def test_interrupt__while_every_thread_hangs_leaves_others_to_read(folder, expected, monkeypatch):
    def held(_name, arrivals, ring):
        return HeldRing(arrivals, ring, num_held=2)

    options = {"budget": "60%", "system": SystemConfig(prefetch=False)}
    model = serve_with_rings(folder, monkeypatch, held, **options)
    with model.moecast as handle, torch.no_grad():
        loop, ring = handle.engine.loop, handle.engine.loop.links[0].ring
        loop.wait = raise_interrupt
        with pytest.raises(KeyboardInterrupt):
            model(TOKENS)
        del loop.wait
        loop.drain()
        assert sorted(ring.replaced) == ring.held == [0, 1]
        assert loop.faults == {Fault.HUNG: 2}
        assert torch.equal(model(TOKENS).logits, expected[0])
        assert loop.num_hanging == handle.engine.cache.top.cache.num_quarantined == 2
        # One ends, and an interrupt comes when it is no longer under way.
        ring._num_held = 0
        ring.held.remove(0)
        loop._arrivals.post(0, ARRIVED, 1e-3)
        with monkeypatch.context() as patch:
            patch.setattr(type(loop), "_complete", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(TOKENS)
        assert torch.equal(model(TOKENS).logits, expected[0])
        assert loop.num_hanging == handle.engine.cache.top.cache.num_quarantined == 1


UNSEEN = [("wait", ARRIVED), ("wait", DAMAGED), ("_finish", ARRIVED)]


@pytest.mark.parametrize(("name", "status"), UNSEEN)
def test_interrupt__pins_no_file_of_what_arrived_unseen(folder, expected, name, status):
    with serving(folder, budget="25%", system="on-demand") as model, torch.no_grad():
        loop, files = model.moecast.engine.loop, model.moecast.engine.store.files
        ring = loop.links[0].ring
        settle = ring.settle

        def interrupt(*_):
            assert name != "wait" or loop._arrivals.wait(WAIT_SECONDS)
            raise KeyboardInterrupt

        setattr(loop, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(TOKENS)
        delattr(loop, name)
        ring.settle = lambda ticket, _: settle(ticket, status)
        loop.drain()
        del ring.settle
        assert ring.running() == []
        assert not any(opened.num_readers for opened in files._files.values())
        assert torch.equal(model(TOKENS).logits, expected[0])
