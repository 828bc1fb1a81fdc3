"""Budgets as users write them; the least one is named in bytes."""

import pytest

from runtime.errors import BudgetError
from runtime.policy.budget import Budget, SlotRequirements, count_slots, divide_slots

NEEDS = SlotRequirements(experts={100: 60}, scratch_bytes=7, top_k=4)


SIZES = [
    *[("50%", 500), ("0.5", 500), (".25", 250), ("1.0", 1000), (0.5, 500), (1.0, 1000), (1e-2, 10)],
    *[("1KiB", 1024), ("1.5 MiB", 1572864), ("512m", 512 << 20), ("8G", 8 << 30)],
    *[("2TiB", 2 << 40), ("2GB", 2_000_000_000), ("1 tb", 10**12)],
    *[("77", 77), (1, 1), (9, 9), (Budget(11), 11)],
]


@pytest.mark.parametrize(("text", "expected"), SIZES)
def test_budget__reads_sizes_and_shares(text, expected):
    assert Budget.parse(text).resolve(total_bytes=1000) == expected


NONSENSE = [
    *("much", "5 apples", "%", "-3", "", "1.5", "500%", "0%"),
    *(0.0, 2.0, -0.5, True, None, float("nan")),
]


@pytest.mark.parametrize("text", NONSENSE)
def test_budget__refuses_nonsense_with_an_example(text):
    with pytest.raises(BudgetError, match="host_budget=.* 4GiB"):
        Budget.parse(text, option="host_budget")


def test_count_slots__names_the_least_budget_and_takes_the_buffer_from_it():
    with pytest.raises(BudgetError, match="the least budget is 407 bytes"):
        count_slots(Budget(406), NEEDS)
    # Half is 3004 of 6007 bytes, 7 of them scratch.
    counted: dict[int | str, int] = {407: 4, 10**9: 60, "50%": 29, "100%": 60}
    assert {text: count_slots(Budget.parse(text), NEEDS) for text in counted} == counted


def test_divide_slots__gives_each_device_its_proportion():
    assert divide_slots(Budget(1507), NEEDS, [{100: 40}, {100: 20}]) == [{100: 10}, {100: 5}]
    with pytest.raises(BudgetError, match="host_budget=1207"):
        divide_slots(Budget(1206, option="host_budget"), NEEDS, [{100: 40}, {100: 20}])


SHARES = [
    (5200, {100: 20, 160: 20}),  # all of them, and no byte more
    (5199, {100: 20, 160: 19}),
    (2600, {100: 10, 160: 10}),
    (1500, {100: 7, 160: 5}),  # a share of each size, and what is left to the smaller
    (640, {100: 0, 160: 4}),  # the least: the largest hold any expert
]


@pytest.mark.parametrize(("num_bytes", "slots"), SHARES)
def test_divide_slots__holds_as_large_a_share_of_each_size(num_bytes, slots):
    needs = SlotRequirements(experts={100: 20, 160: 20}, top_k=4)
    assert divide_slots(Budget(num_bytes), needs, [needs.experts]) == [slots]
    assert count_slots(Budget(num_bytes), needs) == sum(slots.values())


def test_divide_slots__leaves_a_device_out_of_a_size_that_it_does_not_own():
    needs = SlotRequirements(experts={100: 8, 300: 4}, top_k=2)
    owned = [{100: 4, 300: 4}, {100: 4}]
    assert divide_slots(Budget(2000), needs, owned) == owned
    # A fifth of the bytes are the second device's.
    assert divide_slots(Budget(1500), needs, owned) == [{100: 3, 300: 3}, {100: 3}]
    with pytest.raises(BudgetError, match="the least budget is 1000 bytes"):
        divide_slots(Budget(999), needs, owned)
