"""Budgets as users write them; the least one is named in bytes."""

from dataclasses import replace

import pytest

from runtime.errors import BudgetError
from runtime.policy.budget import Budget, SlotRequirements, count_slots, divide_slots

NEEDS = SlotRequirements(slot_bytes=100, scratch_bytes=7, top_k=4, num_experts=60)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50%", 500),
        ("1KiB", 1024),
        ("1.5 MiB", 1572864),
        ("2GB", 2_000_000_000),
        ("77", 77),
        ("2TiB", 2 << 40),
        ("1 tb", 10**12),
        ("0.5", 500),
        (".25", 250),
        ("1.0", 1000),
        (0.5, 500),
        (1.0, 1000),
        (1e-2, 10),
        (1, 1),
        (9, 9),
        (Budget(11), 11),
    ],
)
def test_budget__reads_sizes_and_shares(text, expected):
    assert Budget.parse(text).resolve(total_bytes=1000) == expected


@pytest.mark.parametrize(
    "text", ["much", "5 apples", "%", "-3", "", "1.5", 0.0, 2.0, -0.5, True, None, float("nan")]
)
def test_budget__refuses_nonsense_with_an_example(text):
    with pytest.raises(BudgetError, match="host_budget=.* 4GiB"):
        Budget.parse(text, option="host_budget")


def test_count_slots__names_the_least_budget():
    with pytest.raises(BudgetError, match="the least budget is 407 bytes"):
        count_slots(Budget(406), NEEDS)
    assert count_slots(Budget(407), NEEDS) == 4
    assert count_slots(Budget(10**9), NEEDS) == 60


def test_count_slots__all_experts_and_the_buffer_are_100_percent():
    assert count_slots(Budget.parse("100%"), NEEDS) == 60
    assert count_slots(Budget.parse("50%"), NEEDS) == 29  # 3004 of 6007 bytes, 7 of them scratch


def test_divide_slots__gives_each_device_its_proportion():
    assert divide_slots(Budget(1507), NEEDS, [40, 20]) == [10, 5]
    with pytest.raises(BudgetError, match="host_budget=1207"):
        divide_slots(replace(Budget(1206), option="host_budget"), NEEDS, [40, 20])
