"""n, from the paper's inequalities and from memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import PlanError
from runtime.generation.batch.group_planner import (
    ExpertPopularity,
    KVDemand,
    PlannerCosts,
    make_inequalities,
    plan_group,
)

COSTS = PlannerCosts(
    attention=2.0, gate=1.0, expert_fixed=0.5, expert_per_token=0.25, expert_io=10.0,
    attention_io=3.0, gate_io=4.0,
)  # fmt: skip
FREE = PlannerCosts(**dict.fromkeys(vars(COSTS), 0.0))
ONLY_ATTENTION = replace(FREE, attention=2.0, expert_io=9.0)
# One expert that every token takes, together with one of three others.
SKEWED = ExpertPopularity(np.array([[1.0, 0.5, 0.25, 0.25]]), hot=2)


def demand(num_batches=20, size=100, batch_size=2):
    return KVDemand(batch_size=batch_size, batch_bytes=[size] * num_batches)


def test_inequalities__are_the_papers_by_hand():
    # 6 tokens: hot experts 0 and 1 have 6 and 3 of them, the others 1.5 each.
    used = [1 - (1 - share) ** 6 for share in (1.0, 0.5, 0.25, 0.25)]
    hot = 0.5 * (used[0] + used[1]) + 0.25 * 9
    others = 0.5 * (used[2] + used[3]) + 0.25 * 3
    cold = used[2] + used[3]
    expected = {
        4: (3 * 2, 4),
        5: (3 * 3, 4 + 2 * 10),
        6: (3 * 3 + hot, 4 + (2 + 1) * 10),
        7: (3 * 3 + hot + others, 4 + (2 + cold) * 10 + 3),
    }
    found = make_inequalities(3, batch_size=2, costs=COSTS, popularity=SKEWED)
    sides = {row.number: (row.computes, row.transfers) for row in found}
    assert (len(found), sides) == (4, {n: pytest.approx(both) for n, both in expected.items()})


@given(
    io=st.floats(0.0, 50.0), attention=st.floats(0.01, 5.0), batch_size=st.integers(1, 16),
    experts=st.integers(2, 32), dense_io=st.floats(0.0, 50.0),
)  # fmt: skip
def test_plan__smallest_n_that_hides_transfers(io, attention, batch_size, experts, dense_io):
    costs = PlannerCosts(
        attention=attention, gate=0.1, expert_fixed=0.2, expert_per_token=0.01, expert_io=io,
        attention_io=dense_io, gate_io=dense_io / 10,
    )  # fmt: skip
    popularity = ExpertPopularity.even(3, experts, 2, 2)
    made = plan_group(demand(64, 1, batch_size), costs, popularity, kv_budget=10**6, offloads=False)
    sides = {"batch_size": batch_size, "costs": costs, "popularity": popularity}
    rows = {n: make_inequalities(n, **sides) for n in range(1, 65)}
    hiding = [n for n in rows if all(row.computes >= row.transfers for row in rows[n])]
    smallest = min(hiding, default=None)
    assert (made.smallest, made.n, not made.notes) == (smallest, smallest or 64, bool(smallest))


BOUNDS = [
    (64, 10**6, 18, ""),
    (64, 550, 5, "18 batches would hide all transfers; memory holds 5"),
    (3, 10**6, 3, "18 batches would hide all transfers; the input has 3"),
]


@pytest.mark.parametrize(("num_batches", "kv_budget", "n", "said"), BOUNDS)
def test_plan__memory_and_the_input_bound_n(num_batches, kv_budget, n, said):
    bounds = {"kv_budget": kv_budget, "offloads": False}
    made = plan_group(demand(num_batches), ONLY_ATTENTION, SKEWED, **bounds)
    assert (made.n, made.smallest) == (n, 18)  # 18 * 2 >= 4 * 9
    assert (said in " ".join(made.notes)) if said else not made.notes
    assert made.kv_bytes == 100 * n


def test_plan__what_does_not_fit_is_refused_with_what_would():
    with pytest.raises(PlanError, match=r"takes 100 bytes, and kv_budget is 70; use batch_size=1"):
        plan_group(demand(), COSTS, SKEWED, kv_budget=70, offloads=False)
    with pytest.raises(PlanError, match=r"n=6 needs 600 bytes .* use n=4, kv_budget=600"):
        plan_group(demand(), COSTS, SKEWED, kv_budget=450, offloads=False, asked=6)


def test_plan__caches_go_elsewhere_where_they_may():
    made = plan_group(demand(), COSTS, SKEWED, kv_budget=450, offloads=True, asked=6)
    assert (made.n, made.kv_bytes, made.offloaded_bytes) == (6, 600, 150)
    assert "n=6 as requested" in made.notes[0]


def test_plan__streamed_attention_and_gates_need_more_batches():
    streamed = replace(ONLY_ATTENTION, attention_io=6.0, gate_io=4.0)
    # 23 * 2 >= 4 * 9 + 6 + 4
    for costs, smallest in ((streamed, 23), (streamed.with_dense_in_memory(), 18)):
        made = plan_group(demand(64), costs, SKEWED, kv_budget=10**6, offloads=False)
        assert made.smallest == smallest
