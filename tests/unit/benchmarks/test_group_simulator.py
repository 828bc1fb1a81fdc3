"""Groups of micro-batches in replays: by hand, and for any group against the lower bound."""

from dataclasses import replace
from itertools import count, islice

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.klotski.group_simulator import GroupStep, dense_seconds, make_group_machine
from runtime.config import SystemConfig
from runtime.presets import load_system
from runtime.sim.hardware import Overheads
from runtime.sim.lower_bound import bound_time
from runtime.sim.replay import replay
from runtime.sim.simulator import make_simulator
from tests.builders.entries import tiny_spec
from tests.builders.simulated import routed_step, toy_machine
from tests.builders.spans import RecordedSpans

SPEC = tiny_spec(num_layers=2, num_experts=4, top_k=1)
MACHINE = toy_machine(expert_fixed=1.0, predictor_seconds=0.0)
"""An expert comes in 6 s; a layer takes 10 s, an expert 1 s and 1 s a token."""
KNOWN = {"hardware": MACHINE, "make_machine": make_group_machine, "budget_slots": 8}
AT_ONCE = SystemConfig(prefetch=False, chunked=False, reordered=False, per_layer=False)


def group(*batches, **options):
    """A group of micro-batches, each given by the experts of its layers, one for each request."""
    numbers = count()
    owners = [list(islice(numbers, len(layers[0]))) for layers in batches]
    return GroupStep(list(map(routed_step, batches, owners)), **options)


def run(steps, system=AT_ONCE, **options):
    timeline = RecordedSpans()
    stats = replay(steps, None, spec=SPEC, system=system, timeline=timeline, **KNOWN | options)
    return stats, timeline.spans


def test_group__computes_attention_of_every_micro_batch():
    stats, spans = run([group(((0,), (0,)), ((0,), (0,)), ((0,), (0,)))])
    # Three times 10 s, in which the expert of the first router arrives; 1 + 3 tokens; two layers.
    assert stats.tpot_seconds == [2 * (30 + 4)]
    assert spans[0] == ("fetch", (0, 0), 10, 16)


def test_group__requests_experts_of_a_micro_batch_at_once():
    stats, spans = run([group(((0,), (0,)), ((1,), (0,)))])
    # Layer 0: expert 1 is known at 20 only, when the second router has run.
    assert [span for span in spans if span[1] in (0, (0, 0), (0, 1))] == [
        ("fetch", (0, 0), 10, 16),
        ("compute", (0, 0), 20, 22),
        ("fetch", (0, 1), 20, 26),
        ("stall", 0, 22, 26),
        ("compute", (0, 1), 26, 28),
    ]
    assert stats.decode[0].requests == 2  # each expert once, not once more when all are routed


def test_group__of_one_is_an_ordinary_step():
    layers = ((2, 0), (1, 1))
    plain, plain_spans = run([routed_step(layers, [0, 1])], make_machine=make_simulator)
    grouped, spans = run([group(layers)])
    assert (grouped.tpot_seconds, spans) == (plain.tpot_seconds, plain_spans)


def test_group__computes_experts_batch_by_batch():
    stats, spans = run([group(((0, 1), (0, 0)), ((0, 2), (0, 0)), merges_experts=False)])
    computed = [(e, end - start) for kind, e, start, end in spans if kind == "compute"]
    # Expert 0 of layer 0 is computed twice, by one token each; that of layer 1 by two each.
    assert computed == [
        ((0, 0), 2), ((0, 1), 2), ((0, 0), 2), ((0, 2), 2), ((1, 0), 3), ((1, 0), 3),
    ]  # fmt: skip
    assert sum(layer.misses for layer in stats.decode) == 4


def test_group__loads_caches_one_micro_batch_ahead():
    half = Overheads(transfer_speed_together=0.5)
    step = group(((0,), (0,)), ((0,), (0,)), cache_bytes=10, weight_bytes=5)
    stats, spans = run([step], hardware=replace(MACHINE, overheads=half))
    # Weights and the first cache come in 30 s. The second cache is loaded from 30 on, shares the
    # link with the expert, which is requested at 40, and is there at 56. Attention ends at 66.
    assert spans[:2] == [("fetch", (0, 0), 40, 52), ("compute", (0, 0), 66, 69)]
    # Loads of layer 1 begin at 66: first attention at 96, second from 122 to 132.
    assert spans[2] == ("fetch", (1, 0), 106, 118)
    assert stats.tpot_seconds == [135]


PAIRS = st.tuples(st.integers(0, 3), st.integers(0, 3))
"""Experts of a request in both layers."""


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.lists(st.lists(PAIRS, min_size=1, max_size=4), min_size=1, max_size=6),
    name=st.sampled_from(["klotski", "promoe", "fmoe", "on-demand", "deepspeed"]),
    slots=st.integers(2, 8),
    merges=st.booleans(),
    load_bytes=st.sampled_from([0, 5]),
)
def test_group__ends_and_never_beats_the_bound(chosen, name, slots, merges, load_bytes):
    batches = [(tuple(a for a, _ in batch), tuple(b for _, b in batch)) for batch in chosen]
    steps = [group(*batches, merges_experts=merges, cache_bytes=load_bytes)] * 3
    stats, _ = run(steps, load_system(name), budget_slots=slots)
    machine = {"spec": SPEC, "hardware": MACHINE, "num_slots": slots}
    bound = bound_time(steps, dense_seconds=dense_seconds, **machine)
    assert stats.total_seconds >= bound.prefill_seconds + bound.decode_seconds - 1e-9
    used = [{e for layers in batches for e in layers[layer]} for layer in range(2)]
    assert stats.total.requests == 3 * sum(map(len, used))
