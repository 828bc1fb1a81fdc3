"""Tables of a comparison: the first system of each condition, then all figures."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from predictors.table import (
    Table,
    TableColumn,
    decimals,
    format_or_dash,
    interval,
    mebibytes,
    milliseconds,
    percent,
    times,
)
from train.evaluate.jobs import Row

PLACE = ("hardware", "budget", "batch")
"""Keys of a condition on a machine: systems are compared within one of them."""
CONDITION = ("hardware", "batch")
KNOWN_NOTE = (
    "Share of the bound that a system reaches which knows the routing of this many tokens of each "
    "request when a step begins, the one that is computed included; it evicts by Belady's policy "
    "within them, by decayed counts beyond, and fetches ahead while the link is idle."
)
ROWS_SHOWN = 64
"""Replays up to which every figure is printed; of more, times and speed-ups only."""

FIGURES = (
    TableColumn("system"),
    TableColumn("TPOT ms", "tpot_mean_ms", milliseconds, rank=1),
    TableColumn("95 %", "tpot_interval_ms", interval, rank=5),
    TableColumn("median", "tpot_ms", milliseconds, rank=6),
    TableColumn("p95", "tpot_p95_ms", milliseconds, rank=7),
    TableColumn("p99", "tpot_p99_ms", milliseconds),
    TableColumn("speed-up", "speedup_decode", times, rank=2),
    TableColumn("of bound", "of_bound", percent, rank=3),
    TableColumn("tokens/s", "tokens_per_second", decimals),
    TableColumn("hits", "hit_rate", percent, rank=4),
    TableColumn("stalls", "stall_share", percent, rank=9),
    TableColumn("TTFT ms", "ttft_mean_ms", milliseconds, rank=8),
    TableColumn("TTFT median", "ttft_ms", milliseconds),
    TableColumn("TTFT p95", "ttft_p95_ms", milliseconds),
    TableColumn("TTFT speed-up", "speedup_prefill", times),
    TableColumn("moved", "bytes_moved_per_token", mebibytes, rank=10),
    TableColumn("wasted", "bytes_wasted_per_token", mebibytes),
    TableColumn("late", "bytes_late_per_token", mebibytes),
    TableColumn("predict ms", "predictor_ms_per_token", milliseconds),
    TableColumn("memory", "peak_bytes", mebibytes),
)
"""TPOT and TTFT are means, with the 95 % interval over requests; bytes in MiB."""
ELSEWHERE = "results.json and report.html have them"


def winners_table(results: Row) -> Table:
    """Return the first system of each condition.

    In brackets stands how far ours is behind it or, below 0, ahead of the second.
    """

    def first(standing: Row) -> str:
        if standing["rank"] is None:
            return str(standing["first"])
        name = results["ours"] if standing["rank"] == 1 else standing["first"]
        return f"{name} ({100 * standing['behind_first']:+.1f} %)"

    title = "First in each cell (mean TPOT; systems that know the future are left out)"
    return Table.pivot(
        results["winners"], CONDITION, "budget", first, title=title, elsewhere=ELSEWHERE
    )


def bound_table(results: Row) -> Table:
    """Return the share of the bound that our system reaches in each condition."""
    return Table.pivot(results["winners"], CONDITION, "budget", "of_bound", percent)


def known_table(results: Row) -> Table:
    """Return the share of the bound against the number of known tokens, after our system's."""
    known = results["known"]
    places = {place_of(row) for row in known}
    ours = [
        {**row, "system": f"{results['ours']} (0)"}
        for row in results["rows"]
        if row["system"] == results["ours"] and place_of(row) in places
    ]
    title = "Share of the bound by known tokens"
    return Table.pivot(
        [*ours, *known], PLACE[:2], "system", "of_bound", percent, title=title, elsewhere=ELSEWHERE
    )


def overview(title: str, rows: Sequence[Row]) -> Table:
    """Return TPOT and speed-up of every system at every budget."""

    def figures(row: Row) -> str:
        time = format_or_dash(row["tpot_mean_ms"], milliseconds)
        return f"{time} {format_or_dash(row['speedup_decode'], times)}"

    return Table.pivot(rows, ["system"], "budget", figures, title=title, elsewhere=ELSEWHERE)


def place_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in PLACE)


def by_place(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of these keys, in the order of their first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def show(results: Row, *, console: Console) -> None:
    """Print the first systems, then every figure or, of many replays, times and speed-ups."""
    rows = results["rows"]
    winners_table(results).print(console)
    if results["tally"]["cells"]:
        worst = format_or_dash(results["tally"]["worst_of_bound"], percent)
        line = (
            f"{results['ours']}: {describe_tally(results['tally'])}; at least {worst} of the bound"
        )
        console.print(line, highlight=False)
    if len(rows) <= ROWS_SHOWN:
        for place, here in by_place(rows, *PLACE).items():
            hardware, budget, batch = place
            title = f"{hardware}, budget {budget}, batch {batch} (bytes in MiB, of a token)"
            here.sort(key=lambda row: row["tpot_mean_ms"] or 0.0)
            Table(columns=FIGURES, rows=here, title=title, elsewhere=ELSEWHERE).print(console)
    else:
        for (hardware, batch), here in by_place(rows, *CONDITION).items():
            title = f"{hardware}, batch {batch}: mean TPOT, ms; speed-up over {results['baseline']}"
            overview(title, here).print(console)
        console.print("All figures: results.json and report.html", highlight=False)
    if results["known"]:
        known_table(results).print(console)
    for name, reason in results["missing"].items():
        console.print(f"left out: {name}: {reason}", highlight=False)
    console.print(
        f"{describe_sample(rows)}, from {results['trace']['dataset']}; experts of "
        f"{results['shape']['name']}; simulated, so that equal runs give equal figures",
        highlight=False,
    )


def describe_sample(rows: Sequence[Row]) -> str:
    """Return the numbers of tokens and requests that were replayed, over all batch sizes."""
    tokens, requests = (
        f"{values[0]:,}" if values[0] == values[-1] else f"{values[0]:,} to {values[-1]:,}"
        for values in (sorted({row[key] for row in rows}) for key in ("new_tokens", "prefills"))
    )
    return f"{tokens} generated held-out tokens of {requests} requests"


def describe_tally(tally: Row) -> str:
    """Return in how many cells our system is first by each statistic, and its worst margin."""
    behind = tally["worst_behind_first"]
    worst = (
        f"everywhere at least {-100 * behind:.1f} % faster than the second"
        if behind < 0
        else f"at worst {100 * behind:.1f} % behind the first"
    )
    return (
        f"first in {tally['first']} of {tally['cells']} cells by mean TPOT (in "
        f"{tally['clearly_first']} of them beyond the 95 % interval), in "
        f"{tally['first_by_median']} by the median, in {tally['first_by_p95']} by p95; within 2 % "
        f"of first in {tally['close']}, {worst}"
    )
