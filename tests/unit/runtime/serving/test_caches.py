"""Answers whose caches do not fit together wait; what would never fit is refused."""

import pytest

from runtime.errors import BudgetError
from runtime.hf.kv import CacheSize
from runtime.serving.caches import CacheBudget


def test_budget__holds_what_fits() -> None:
    budget = CacheBudget(CacheSize(10, 100), 1000)
    assert budget.longest == 90
    assert budget.fit([90])
    assert not budget.fit([91])
    assert budget.fit([40, 40])
    assert not budget.fit([40, 41])
    assert budget.bytes_of([3, 4]) == 270


def test_budget__of_caches_that_do_not_grow_bounds_no_length() -> None:
    budget = CacheBudget(CacheSize(0, 400), 1000)
    assert budget.longest is None
    assert budget.fit([10**9, 10**9])
    assert not budget.fit([1, 1, 1])


@pytest.mark.parametrize(
    ("size", "said"),
    [(CacheSize(0, 0), "can not be measured"), (CacheSize(10, 985), "two tokens takes 1005")],
)
def test_budget__that_can_not_be_is_refused(size: CacheSize, said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        CacheBudget(size, 1000)
