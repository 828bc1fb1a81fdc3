"""Ranks of systems, worked out by hand."""

import io
from dataclasses import asdict

import pytest
from rich.console import Console

from train.evaluate.jobs import ReplayRow
from train.evaluate.results import compare_rows, rank_systems, tally
from train.evaluate.table import FIGURES, IMPORTANCE, full_table


def row(system, tpot, *, budget="50%", ttft=100.0):
    fields = dict.fromkeys(ReplayRow.__dataclass_fields__)
    own = {"hardware": "toy", "budget": budget, "batch": 1, "system": system}
    return ReplayRow(**{**fields, **own, "tpot_ms": tpot, "ttft_ms": ttft})


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


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_full_table__shows_whole_figures_at_every_width(width):
    rows = [{**asdict(row("moe-infinity-request", 1234.5)), "speedup_decode": 1.31}]
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=width)
    full_table("laptop", rows).print(console)
    text = file.getvalue()
    assert "…" not in text
    assert "1.31x" in text
    assert max(map(len, text.splitlines())) <= width
    assert set(IMPORTANCE) <= {column.heading for column in FIGURES}


def test_rank__names_the_first_and_the_distance_of_ours():
    half, most = rank_systems(ROWS, ours="ours", bound="oracle")
    assert (half.first, half.second, half.rank) == ("promoe", "ours", 2)
    assert half.behind_first == pytest.approx(0.1)
    assert not half.close
    assert half.share_of_bound == pytest.approx(4.0 / 5.5)
    assert (most.first, most.rank, most.close) == ("ours", 1, True)
    # First: the second takes 6.0, so ours takes a quarter less.
    assert most.behind_first == pytest.approx(-0.25)


def test_tally__counts_conditions_and_keeps_the_worst():
    counted = tally(rank_systems(ROWS, ours="ours", bound="oracle"))
    assert (counted.cells, counted.first, counted.close) == (2, 1, 1)
    assert counted.worst_behind_first == pytest.approx(0.1)
    assert counted.worst_share_of_bound == pytest.approx(4.0 / 5.5)


def test_rank__is_null_without_our_system():
    (place,) = rank_systems(ROWS[:2], ours="ours", bound="oracle")
    assert (place.first, place.rank, place.share_of_bound) == ("promoe", None, None)
    assert tally([place]).cells == 0


def test_compare__uses_baseline_and_bound_of_the_condition():
    by_place = {
        (one.row.budget, one.row.system): one
        for one in compare_rows(ROWS, baseline="on-demand", bound="oracle")
    }
    promoe = by_place["50%", "promoe"]
    assert (promoe.speedup_decode, promoe.speedup_prefill) == (2.0, 2.0)
    assert promoe.share_of_bound == pytest.approx(0.8)
    assert by_place["75%", "on-demand"].speedup_decode == 1.0


def test_compare__is_null_without_a_measured_time():
    (alone,) = compare_rows([row("promoe", None)], baseline="on-demand", bound="oracle")
    assert alone.speedup_decode is None
    assert alone.share_of_bound is None
