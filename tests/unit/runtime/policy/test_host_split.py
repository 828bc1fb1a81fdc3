"""The split of missed experts between the accelerator and the processor of host memory."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.placement import SplitCosts, choose_host_experts

SECONDS = st.floats(0.0, 10.0)
"""From costs of nothing to those that outweigh everything else."""


@given(st.dictionaries(st.integers(0, 99), st.integers(1, 40), max_size=7), *(SECONDS,) * 5)
def test_split__is_as_short_as_the_best_of_all_splits(
    tokens_per_expert, copy_seconds, copy_fixed, host_fixed, per_expert, per_token
):
    def side_seconds(host: set[int]) -> float:
        copied = tokens_per_expert.keys() - host
        copy_side = copy_fixed + copy_seconds * len(copied) if copied else 0.0
        computed = [per_expert + per_token * tokens_per_expert[expert] for expert in host]
        return max(copy_side, host_fixed + sum(computed) if host else 0.0)

    costs = SplitCosts(
        copy_seconds=copy_seconds, copy_fixed=copy_fixed, host_fixed=host_fixed,
        host_seconds=lambda num_tokens: per_expert + per_token * num_tokens,
    )  # fmt: skip
    host, seconds = choose_host_experts(tokens_per_expert, costs)
    sizes = range(len(tokens_per_expert) + 1)
    splits = [set(some) for size in sizes for some in combinations(tokens_per_expert, size)]
    assert host <= tokens_per_expert.keys()
    best = pytest.approx(min(map(side_seconds, splits)), rel=1e-9, abs=1e-12)
    assert (seconds, side_seconds(set(host))) == (best, best)


def test_split__copies_where_both_take_as_long():
    costs = SplitCosts(copy_seconds=1.0, host_seconds=float)
    assert choose_host_experts({5: 1}, costs) == (frozenset(), 1.0)
