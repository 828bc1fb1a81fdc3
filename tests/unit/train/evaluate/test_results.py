"""Ranks of systems, worked out by hand."""

import pytest

from train.evaluate.results import compare_rows, rank_systems, tally


def row(system, tpot, *, budget="50%", ttft=100.0, **changes):
    own = {"hardware": "toy", "budget": budget, "batch": 1, "system": system, "bound_tpot_ms": None}
    times = {"tpot_mean_ms": tpot, "tpot_ms": tpot, "tpot_p95_ms": tpot, "ttft_mean_ms": ttft}
    runs = {"run_ms": [tpot] * 8, "run_steps": [1] * 8, "of_bound": tpot and 3.3 / tpot}
    return {**own, **times, **runs, **changes}


ROWS = [
    row("on-demand", 10.0, ttft=200.0), row("promoe", 5.0), row("ours", 5.5), row("oracle", 4.0),
    row("on-demand", 8.0, budget="75%"), row("promoe", 6.0, budget="75%"),
    row("ours", 4.5, budget="75%"), row("oracle", 3.6, budget="75%"),
]  # fmt: skip


def test_rank__names_the_first_and_the_distance_of_ours_and_keeps_the_worst():
    half, most = rank_systems(ROWS, ours="ours", left_out=["oracle"])
    assert (half["first"], half["second"], half["rank"]) == ("promoe", "ours", 2)
    assert not half["close"]
    assert (half["behind_first"], half["of_bound"]) == pytest.approx((0.1, 3.3 / 5.5))
    assert (most["first"], most["rank"], most["close"]) == ("ours", 1, True)
    # First: the second takes 6.0, so ours takes a quarter less.
    assert most["behind_first"] == pytest.approx(-0.25)
    assert most["behind_interval"] == pytest.approx((-0.25, -0.25))
    counted = tally([half, most], ours="ours")
    assert [counted[key] for key in ("cells", "first", "clearly_first", "close")] == [2, 1, 1, 1]
    worst = counted["worst_behind_first"], counted["worst_of_bound"]
    assert worst == pytest.approx((0.1, 3.3 / 5.5))


def test_rank__is_by_the_mean_with_the_interval_of_the_margin():
    """Ours is faster on average only: by one request of six, which not every resample draws."""
    ours = row("ours", 9.0, tpot_ms=10.0, tpot_p95_ms=9.5, run_ms=[10.0] * 5 + [4.0])
    other = row("other", 9.9, tpot_p95_ms=12.0, run_ms=[9.9] * 6)
    (place,) = rank_systems([ours, other], ours="ours", left_out=[])
    firsts = [place[key] for key in ("first", "first_by_median", "first_by_p95")]
    assert firsts == ["ours", "other", "ours"]
    low, high = place["behind_interval"]
    assert low < place["behind_first"] < 0 < high
    counted = tally([place], ours="ours")
    assert (counted["first"], counted["clearly_first"]) == (1, 0)
    assert (counted["first_by_median"], counted["first_by_p95"]) == (0, 1)


def test_rank__is_null_without_our_system():
    (place,) = rank_systems(ROWS[:2], ours="ours", left_out=[])
    assert (place["first"], place["rank"], place["of_bound"]) == ("promoe", None, None)
    assert tally([place], ours="ours")["cells"] == 0


def test_compare__uses_the_baseline_of_the_condition():
    compared = compare_rows(ROWS, baseline="on-demand")
    by_place = {(one["budget"], one["system"]): one for one in compared}
    promoe = by_place["50%", "promoe"]
    assert (promoe["speedup_decode"], promoe["speedup_prefill"]) == (2.0, 2.0)
    assert promoe["speedup_interval"] == pytest.approx((2.0, 2.0))
    assert by_place["75%", "on-demand"]["speedup_decode"] == 1.0


def test_compare__is_null_without_a_measured_time():
    (alone,) = compare_rows([row("promoe", None)], baseline="on-demand")
    assert (alone["speedup_decode"], alone["speedup_interval"]) == (None, None)
