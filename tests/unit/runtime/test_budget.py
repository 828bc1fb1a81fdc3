"""Budgets as users write them; the least one is named in bytes."""

import pytest

from runtime.budget import parse_budget, slots_of
from runtime.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50%", 500),
        ("1KiB", 1024),
        ("1.5 MiB", 1572864),
        ("2GB", 2_000_000_000),
        ("77", 77),
        (9, 9),
    ],
)
def test_parse_budget__sizes_and_shares(text, expected):
    assert parse_budget(text, total_bytes=1000) == expected


@pytest.mark.parametrize("text", ["much", "5 apples", "%", "-3", ""])
def test_parse_budget__nonsense_is_refused_with_an_example(text):
    with pytest.raises(BudgetError, match="4GiB"):
        parse_budget(text, total_bytes=1000)


def test_slots_of__too_small_names_the_least():
    kwargs = {"slot_bytes": 100, "scratch_bytes": 7, "top_k": 4, "num_experts": 60}
    with pytest.raises(BudgetError, match="the least budget is 407 bytes"):
        slots_of(406, **kwargs)
    assert slots_of(407, **kwargs) == 4
    assert slots_of(10**9, **kwargs) == 60
