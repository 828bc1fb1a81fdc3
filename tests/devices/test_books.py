"""What the policy core knows does not depend on where, or how late, experts are computed."""

import pytest
import torch

from runtime.accelerator import copy_together, host_copy, keep_copy
from runtime.config import Exact
from tests.builders.held_ring import HeldRing
from tests.builders.served import serve, serve_with_rings
from tests.builders.sim_device.backend import simulated

TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(3))
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
COUNTED = ("requests", "hits", "misses", "joins", "evictions", "bytes_moved")


def read_in_order(name, arrivals, ring):
    """Reads end in the order of their requests, each when it is waited for."""
    return ring if name == "copy" else HeldRing(arrivals, ring, num_held=0)


def run(folder, device, **options):
    options |= {"device": device, "predictor": None, "host_budget": "100%"}
    with pytest.MonkeyPatch.context() as patch:
        model = serve_with_rings(folder, patch, read_in_order, **options)
    with model.moecast as handle, torch.no_grad():
        tokens = model.generate(TOKENS.to(device), **GREEDY).tolist()
        cache = handle.engine.cache
        layers = [{n: getattr(c, n) for n in COUNTED} for c in cache.counters]
        return tokens, layers, sorted(cache.top.cache.entries), handle.stats()["requests"]


SYSTEMS = [(system, Exact.EAGER) for system in ("on-demand", "lfu")]
SYSTEMS += [(system, Exact.GROUPED) for system in ("on-demand", "on-demand-at-once")]


@pytest.mark.parametrize(("system", "exact"), SYSTEMS)
@pytest.mark.parametrize("budget", ["40%", "100%"])
@pytest.mark.usefixtures("sim")
def test_books__are_those_of_the_cpu(folder, system, exact, budget):
    options = {"system": system, "exact": exact, "budget": budget}
    assert run(folder, "sim", **options) == run(folder, "cpu", **options)


def test_books__do_not_go_by_when_copies_end(folder):
    options = {"system": "on-demand-at-once", "exact": Exact.GROUPED, "budget": "30%"}
    with simulated() as late:
        late.random.random = lambda: 1.0
        expected = run(folder, "sim", **options)
    for seed in range(3):
        with simulated(seed=seed):
            assert run(folder, "sim", **options) == expected


def test_choices__that_stay_on_the_device_are_all_counted(folder, sim):
    model = serve(folder, device="sim", exact=Exact.GROUPED, budget="100%", system="promoe")
    with model.moecast as handle, torch.no_grad():
        while not handle.engine.cache.is_complete:
            handle.engine.move_when_idle()
        before = handle.stats()
        sim.random.random = lambda: 1.0
        for _ in range(3):
            model(TOKENS[:1, :1].to("sim"))
        after, wanted = handle.stats(), 3 * len(handle.layers) * handle.spec.top_k
        assert after["requests"] - before["requests"] == after["hits"] - before["hits"] == wanted


def test_copies__of_several_tensors_are_one(sim):
    ids, wide = torch.tensor([[3, 1]], device="sim"), torch.ones(1, 5, device="sim").bfloat16()
    sim.counts.clear()
    found = copy_together([ids, None, wide])
    assert found[0].tolist() == [[3, 1]]
    assert found[1] is None
    assert torch.equal(found[2], torch.ones(1, 5, dtype=torch.bfloat16))
    assert sim.counts["copies to the host"] == sim.counts["synchronisations"] == 1
    keep_copy(ids, found[0])
    assert host_copy(ids) is found[0]
    ids += 1
    assert host_copy(ids).tolist() == [[4, 2]]
