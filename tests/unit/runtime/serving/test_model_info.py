"""The KV budget: what fits, and budgets that are invalid."""

import pytest

from runtime.errors import BudgetError
from runtime.hf.kv import CacheSize
from runtime.serving.served_model import KVCacheBudget


def test_kv_budget__counts_fixed_and_growing_bytes() -> None:
    budget = KVCacheBudget(CacheSize(10, 100), 1000)
    assert budget.max_length == 90
    assert budget.fits([90])
    assert not budget.fits([91])
    assert budget.fits([40, 40])
    assert not budget.fits([40, 41])
    assert budget.bytes_of([3, 4]) == 270


def test_kv_budget__of_caches_that_do_not_grow_bounds_no_length() -> None:
    budget = KVCacheBudget(CacheSize(0, 400), 1000)
    assert budget.max_length is None
    assert budget.fits([10**9, 10**9])
    assert not budget.fits([1, 1, 1])


@pytest.mark.parametrize(
    ("size", "message"),
    [(CacheSize(0, 0), "cannot be measured"), (CacheSize(10, 985), "two tokens takes 1005")],
)
def test_kv_budget__that_is_invalid_is_an_error(size: CacheSize, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        KVCacheBudget(size, 1000)
