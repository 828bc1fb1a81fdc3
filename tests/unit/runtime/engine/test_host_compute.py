"""`system.hybrid=true`: missed experts are computed in host memory where that is sooner."""

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from runtime.config import Exact, SystemConfig
from runtime.engine.host_compute import HostCompute
from runtime.errors import CheckpointError, PlanError
from runtime.store.ggml.library import find_products
from tests.builders import served
from tests.builders.families.build import save_family
from tests.builders.gguf_files import gguf_file
from tests.builders.models import GREEDY, TOKENS

HYBRID = SystemConfig(hybrid=True)
EXPERT_BYTES = 1000


def serve_slowly(folder, monkeypatch: pytest.MonkeyPatch, **options: Any):
    """The model, above whose host memory copies are late."""
    delayed = served.before_transfers(lambda _: time.sleep(0.002))

    def wrap(name: str, transfer: served.Transfer) -> served.Transfer:
        return delayed(name, transfer) if name == "copy" else transfer

    return served.serve_with_transfers(folder, monkeypatch, wrap, **options)


SYSTEMS = [({}, "40%"), ({"prefetch": False}, "100%"), ({"reordered": False}, "100%")]


@pytest.mark.parametrize(("changes", "host"), SYSTEMS)
def test_hybrid__changes_no_bit_between_two_tiers(folder, expected, monkeypatch, changes, host):
    system = SystemConfig(hybrid=True, **changes)
    model = serve_slowly(folder, monkeypatch, budget="25%", host_budget=host, system=system)
    with model.moecast as handle:
        for _ in range(2):
            assert torch.equal(model(TOKENS).logits, expected[0])
            assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        stats = handle.stats()
        assert stats["computed_below"] > 0
        assert served.count_pins(handle.engine) == 0, "nothing stays pinned"
        assert stats["requests"] == stats["hits"] + stats["joins"] + stats["misses"]


@pytest.mark.skipif(find_products() is None, reason="NO GGML LIBRARY")
def test_hybrid__quantised_experts_are_multiplied_as_they_lie_in_host_memory(monkeypatch):
    file = gguf_file("qwen3moe-Q4_0")
    with served.serving(file, budget="100%", system="on-demand") as resident:
        expected = resident.generate(TOKENS, **GREEDY)
    options = {"budget": "40%", "host_budget": "100%"}
    system = SystemConfig(hybrid=True, prefetch=False)
    model = serve_slowly(file, monkeypatch, system=system, **options)
    with model.moecast as handle:
        for _ in range(2):
            assert torch.equal(model.generate(TOKENS, **GREEDY), expected)
        assert handle.stats()["computed_below"] > 0


def test_hybrid__a_step_that_fails_releases_what_it_did_not_compute(folder, expected, monkeypatch):
    model = serve_slowly(folder, monkeypatch, budget="25%", host_budget="100%", system=HYBRID)
    with model.moecast as handle:
        compute, fail = handle.engine._host_compute, Mock(side_effect=RuntimeError("no weights"))
        with monkeypatch.context() as patch:
            patch.setattr(compute, "weights", fail)
            # Whatever was measured: computing there is faster than any copy.
            patch.setattr(compute, "_first_seconds", 0.0)
            patch.setattr(compute, "_further_seconds", 0.0)
            with pytest.raises(RuntimeError, match="no weights"):
                model.generate(torch.randint(0, 64, (1, 9)), **GREEDY)
        layer, _ = fail.call_args_list[0].args
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        assert compute.waiting(layer) == []


class FakeCache:
    """Everything is missed and lies in host memory."""

    def __init__(self) -> None:
        self.pinned: set[tuple[int, int]] = set()

    def missed_in_host_memory(self, _layer: int, experts: Any) -> list[int]:
        return list(experts)

    def request_routed(self, layer: int, tokens: Any, *, computed_below: Any) -> list[int]:
        self.pinned |= {(layer, e) for e in computed_below}
        return [e for e in tokens if e not in computed_below]

    def release_below(self, layer: int, experts: Any) -> None:
        self.pinned -= {(layer, e) for e in experts}


def make(*, copy_seconds: float, host_seconds: float) -> tuple[HostCompute, FakeCache]:
    """Measurements of copies of one expert, and of one expert's token in host memory."""
    copies = SimpleNamespace(moved_bytes=10 * EXPERT_BYTES, busy_seconds=10 * copy_seconds)
    arena = SimpleNamespace(chunk_ranges=lambda _layer: [[(0, 600)], [(600, EXPERT_BYTES)]])
    cache: Any = FakeCache()
    compute = HostCompute(cache, arena, copies)  # type: ignore[arg-type]
    (first,) = set(range(3)) - set(compute.request_routed(0, dict.fromkeys(range(3), 1)))
    compute.computed(0, first, host_seconds)
    return compute, cache


SPLITS = [(1.0, 1.0, 2), (1.0, 9.0, 0), (9.0, 1.0, 4), (3.0, 1.0, 3)]


@pytest.mark.parametrize(("copy_seconds", "host_seconds", "on_host"), SPLITS)
def test_choice__is_the_split_whose_longer_side_is_shortest(copy_seconds, host_seconds, on_host):
    """Four experts: 2 and 2; copies alone; computation alone; one copy and three computations."""
    compute, cache = make(copy_seconds=copy_seconds, host_seconds=host_seconds)
    order = compute.request_routed(1, dict.fromkeys(range(4), 1))
    assert len(order) == 4 - on_host
    assert cache.pinned == {(1, e) for e in compute.waiting(1)}
    compute.cancel()
    assert not cache.pinned
    assert compute.waiting(1) == []


def test_choice__nothing_is_tried_before_a_copy_was_measured():
    cache: Any = FakeCache()
    copies: Any = SimpleNamespace(moved_bytes=0, busy_seconds=0.0)
    compute = HostCompute(cache, SimpleNamespace(chunk_ranges=lambda _: [[(0, 1)]]), copies)  # type: ignore[arg-type]
    assert compute.request_routed(0, {1: 1, 2: 1}) == [1, 2]


def test_choice__more_tokens_cost_what_they_have_cost():
    compute, _ = make(copy_seconds=3.0, host_seconds=1.0)
    for _ in range(200):
        compute._record(1, 1.0)
        compute._record(5, 9.0)
    # Two seconds for each further token: 1 + 3 x 2 = 7 with four tokens against two copies.
    assert compute.request_routed(1, {0: 4, 1: 4}) == [0, 1]
    assert compute.request_routed(2, {0: 4, 1: 1}) == [0]


def test_hybrid__is_refused_where_it_has_no_sense(folder, tmp_path):
    with pytest.raises(PlanError, match="on a CPU every expert.*host_budget=100%"):
        served.serve(folder, budget="50%", system=HYBRID)
    with pytest.raises(CheckpointError, match="grouped: system.hybrid=true computes some experts"):
        served.serve(folder, budget="50%", host_budget="100%", system=HYBRID, exact=Exact.GROUPED)
    own_loop = save_family(tmp_path / "own", "longcat_flash")
    with pytest.raises(PlanError, match="computes its experts with other code"):
        served.serve(own_loop, budget="50%", host_budget="100%", system=HYBRID)
