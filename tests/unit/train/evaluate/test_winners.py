"""Who is first, worked out by hand."""

import pytest

from train.evaluate.winners import compared, tally, winners


def row(system, tpot, *, budget="50%", ttft=100.0):
    return {
        "hardware": "toy",
        "budget": budget,
        "batch": 1,
        "system": system,
        "tpot_ms": tpot,
        "ttft_ms": ttft,
    }


ROWS = [
    row("on-demand", 10.0, ttft=200.0),
    row("promoe", 5.0),
    row("ours", 5.5),
    row("oracle", 4.0),
    row("on-demand", 8.0, budget="75%"),
    row("promoe", 6.0, budget="75%"),
    row("ours", 4.5, budget="75%"),
    row("oracle", 3.6, budget="75%"),
]


def test_winners__say_who_is_first_and_how_far_ours_is_behind_or_ahead():
    half, most = winners(ROWS, ours="ours", bound="oracle")
    assert (half["first"], half["second"], half["rank"]) == ("promoe", "ours", 2)
    assert half["behind_first"] == pytest.approx(0.1)
    assert not half["close"]
    assert half["share_of_bound"] == pytest.approx(4.0 / 5.5)
    assert (most["first"], most["rank"], most["close"]) == ("ours", 1, True)
    # First: the second takes 6.0, so ours takes a quarter less.
    assert most["behind_first"] == pytest.approx(-0.25)


def test_tally__counts_cells_and_keeps_the_worst():
    counted = tally(winners(ROWS, ours="ours", bound="oracle"))
    assert (counted["cells"], counted["first"], counted["close"]) == (2, 1, 1)
    assert counted["worst_behind_first"] == pytest.approx(0.1)
    assert counted["worst_share_of_bound"] == pytest.approx(4.0 / 5.5)


def test_winners__without_ours_say_so_with_nulls():
    (place,) = winners(ROWS[:2], ours="ours", bound="oracle")
    assert (place["first"], place["rank"], place["share_of_bound"]) == ("promoe", None, None)
    assert tally([place])["cells"] == 0


def test_compared__against_baseline_and_bound_of_the_same_cell():
    by_place = {
        (one["budget"], one["system"]): one
        for one in compared(ROWS, baseline="on-demand", bound="oracle")
    }
    promoe = by_place["50%", "promoe"]
    assert (promoe["speedup_decode"], promoe["speedup_prefill"]) == (2.0, 2.0)
    assert promoe["share_of_bound"] == pytest.approx(0.8)
    assert by_place["75%", "on-demand"]["speedup_decode"] == 1.0


def test_compared__is_null_where_a_time_was_not_measured():
    (alone,) = compared([row("promoe", None)], baseline="on-demand", bound="oracle")
    assert alone["speedup_decode"] is None
    assert alone["share_of_bound"] is None
