"""Tables of a comparison in the terminal: the first system of each condition, then all figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from predictors.table import Table
from runtime.tools.report.tables import (
    FigureColumn,
    Row,
    decimals,
    format_or_dash,
    interval,
    mebibytes,
    milliseconds,
    percent,
    speed_up,
)

KNOWN_NOTE = (
    "Share of the bound that a system reaches which knows the routing of this many tokens of each "
    "request when a step begins, the one that is computed included; it evicts by Belady's policy "
    "within them, by decayed counts beyond, and fetches ahead while the link is idle."
)
ROWS_SHOWN = 64
"""Replays up to which every figure is printed; of more, times and speed-ups only."""

FIGURES = (
    FigureColumn("TPOT ms", "tpot_mean_ms", milliseconds),
    FigureColumn("95 %", "tpot_interval_ms", interval),
    FigureColumn("median", "tpot_ms", milliseconds),
    FigureColumn("p95", "tpot_p95_ms", milliseconds),
    FigureColumn("p99", "tpot_p99_ms", milliseconds),
    FigureColumn("speed-up", "speedup_decode", speed_up),
    FigureColumn("of bound", "of_bound", percent),
    FigureColumn("tokens/s", "tokens_per_second", decimals),
    FigureColumn("hits", "hit_rate", percent),
    FigureColumn("stalls", "stall_share", percent),
    FigureColumn("TTFT ms", "ttft_mean_ms", milliseconds),
    FigureColumn("TTFT median", "ttft_ms", milliseconds),
    FigureColumn("TTFT p95", "ttft_p95_ms", milliseconds),
    FigureColumn("TTFT speed-up", "speedup_prefill", speed_up),
    FigureColumn("moved", "bytes_moved_per_token", mebibytes),
    FigureColumn("wasted", "bytes_wasted_per_token", mebibytes),
    FigureColumn("late", "bytes_late_per_token", mebibytes),
    FigureColumn("predict ms", "predictor_ms_per_token", milliseconds),
    FigureColumn("memory", "peak_bytes", mebibytes),
)
"""TPOT and TTFT are means, with the 95 % interval over requests; bytes in MiB."""

IMPORTANCE = (
    *("TPOT ms", "speed-up", "of bound", "hits", "95 %", "median", "p95", "TTFT ms"),
    *("stalls", "moved"),
)
ELSEWHERE = "results.json and report.html have them"


def standing_text(standing: Mapping[str, Any], ours: str) -> str:
    """Return the first system and how far ours is behind it or, below 0, ahead of the second."""
    if standing["rank"] is None:
        return standing["first"]
    first = ours if standing["rank"] == 1 else standing["first"]
    return f"{first} ({100 * standing['behind_first']:+.1f} %)"


def condition_grid(
    standings: Sequence[Mapping[str, Any]], texts: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows: a row for each machine and batch size, a column for each budget."""
    by_place = {
        (standing["hardware"], standing["batch"], standing["budget"]): text
        for standing, text in zip(standings, texts, strict=True)
    }
    budgets = list(dict.fromkeys(budget for _, _, budget in by_place))
    rows = [
        [
            hardware,
            str(batch),
            *(by_place.get((hardware, batch, budget), "-") for budget in budgets),
        ]
        for hardware, batch in dict.fromkeys(place[:2] for place in by_place)
    ]
    return ["hardware", "batch", *budgets], rows


def winners_grid(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return which system is first in each condition."""
    standings = results["winners"]
    texts = [standing_text(standing, results["ours"]) for standing in standings]
    return condition_grid(standings, texts)


def bound_grid(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the share of the bound that our system reaches in each condition."""
    standings = results["winners"]
    texts = [format_or_dash(standing["of_bound"], percent) for standing in standings]
    return condition_grid(standings, texts)


def known_grid(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the share of the bound against the number of known tokens, after our system's."""
    rows = results["known"]
    labels = list(dict.fromkeys(row["system"] for row in rows))
    body = []
    for hardware, budget, batch in dict.fromkeys(map(row_place, rows)):
        place = hardware, budget, batch
        ours = [row for row in results["rows"] if row["system"] == results["ours"]]
        shares = {row["system"]: row["of_bound"] for row in rows if row_place(row) == place}
        own = next((row["of_bound"] for row in ours if row_place(row) == place), None)
        cells = [
            format_or_dash(own, percent),
            *(format_or_dash(shares[label], percent) for label in labels),
        ]
        body.append([hardware, budget, *cells])
    return ["hardware", "budget", f"{results['ours']} (0)", *labels], body


def row_place(row: Row) -> tuple[str, str, int]:
    return row["hardware"], row["budget"], row["batch"]


def describe_sample(rows: Sequence[Row]) -> str:
    """Return the numbers of tokens and requests that were replayed, over all batch sizes."""
    tokens, requests = (
        f"{values[0]:,}" if values[0] == values[-1] else f"{values[0]:,} to {values[-1]:,}"
        for values in (sorted({row[key] for row in rows}) for key in ("new_tokens", "prefills"))
    )
    return f"{tokens} generated held-out tokens of {requests} requests"


def full_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the figures of one condition, the fastest system first."""
    return Table.of(
        ["system", *(column.heading for column in FIGURES)],
        [
            [row["system"], *(column.text(row) for column in FIGURES)]
            for row in sorted(rows, key=lambda row: row["tpot_mean_ms"] or 0.0)
        ],
        title=title,
        importance=IMPORTANCE,
        elsewhere=ELSEWHERE,
    )


def overview(rows: Sequence[Row], budgets: Sequence[str]) -> list[list[str]]:
    """Return TPOT and speed-up of every system at every budget."""
    body = []
    for system in dict.fromkeys(row["system"] for row in rows):
        by_budget = {row["budget"]: row for row in rows if row["system"] == system}
        cells = [
            f"{format_or_dash(by_budget[budget]['tpot_mean_ms'], milliseconds)} "
            f"{format_or_dash(by_budget[budget]['speedup_decode'], speed_up)}"
            for budget in budgets
        ]
        body.append([system, *cells])
    return body


def show(results: Mapping[str, Any], *, console: Console) -> None:
    """Print the first systems, then every figure or, of many replays, times and speed-ups."""
    rows = results["rows"]
    columns, body = winners_grid(results)
    title = "First in each cell (mean TPOT; systems that know the future are left out)"
    Table.of(columns, body, title=title, left=2, elsewhere=ELSEWHERE).print(console)
    if results["tally"]["cells"]:
        print_tally(results, console)
    if len(rows) <= ROWS_SHOWN:
        for place in dict.fromkeys((row["hardware"], row["budget"], row["batch"]) for row in rows):
            here = [row for row in rows if (row["hardware"], row["budget"], row["batch"]) == place]
            hardware, budget, batch = place
            title = f"{hardware}, budget {budget}, batch {batch} (bytes in MiB, of a token)"
            full_table(title, here).print(console)
    else:
        budgets = list(dict.fromkeys(row["budget"] for row in rows))
        for hardware, batch in dict.fromkeys((row["hardware"], row["batch"]) for row in rows):
            here = [row for row in rows if (row["hardware"], row["batch"]) == (hardware, batch)]
            title = f"{hardware}, batch {batch}: mean TPOT, ms; speed-up over {results['baseline']}"
            body = overview(here, budgets)
            Table.of(["system", *budgets], body, title=title, elsewhere=ELSEWHERE).print(console)
        console.print("All figures: results.json and report.html", highlight=False)
    if results["known"]:
        columns, body = known_grid(results)
        table = Table.of(
            columns,
            body,
            title="Share of the bound by known tokens",
            left=2,
            elsewhere=ELSEWHERE,
        )
        table.print(console)
    for name, reason in results["missing"].items():
        console.print(f"left out: {name}: {reason}", highlight=False)
    console.print(
        f"{describe_sample(rows)}, from {results['trace']['dataset']}; experts of "
        f"{results['shape']['name']}; simulated, so that equal runs give equal figures",
        highlight=False,
    )


def describe_tally(tally: Mapping[str, Any]) -> str:
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


def print_tally(results: Mapping[str, Any], console: Console) -> None:
    """Print in how many conditions our system is first, and its worst figures."""
    tally = results["tally"]
    console.print(
        f"{results['ours']}: {describe_tally(tally)}; at least "
        f"{format_or_dash(tally['worst_of_bound'], percent)} of the bound",
        highlight=False,
    )
