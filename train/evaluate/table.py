"""The comparison in the terminal: who is first, then the systems' figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from predictors.units import MIB
from train.evaluate.winners import cells_of

ROWS_SHOWN = 64
"""Cells up to which every figure is printed; of more, times and speed-ups only."""

Row = Mapping[str, Any]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def mib(value: float | None) -> str:
    return "-" if value is None else f"{value / MIB:,.1f}"


FIGURES = (
    ("TPOT ms", "tpot_ms", ms),
    ("speed-up", "speedup_decode", times),
    ("of bound", "share_of_bound", percent),
    ("p95", "tpot_p95_ms", ms),
    ("p99", "tpot_p99_ms", ms),
    ("tokens/s", "tokens_per_second", lambda value: f"{value:.1f}"),
    ("hits", "hit_rate", percent),
    ("stalls", "stall_share", percent),
    ("TTFT ms", "ttft_ms", ms),
    ("TTFT speed-up", "speedup_prefill", times),
    ("moved", "bytes_moved_per_token", mib),
    ("wasted", "bytes_wasted_per_token", mib),
    ("late", "bytes_late_per_token", mib),
    ("predict ms", "predictor_ms_per_token", ms),
    ("memory", "peak_bytes", mib),
)
"""Heading, key in results.json and how it is written; bytes in MiB."""

NARROW = ("TPOT ms", "speed-up", "of bound", "p99", "hits", "stalls", "TTFT ms")
"""Of these, what a terminal of 80 letters has room for."""

WIDE_LETTERS = 150
"""From which all of them fit."""


def place_text(place: Mapping[str, Any], ours: str) -> str:
    """One cell of the table of winners: the first, and how far ours is from it, or the second."""
    if place["rank"] is None:
        return place["first"]
    if place["rank"] == 1:
        return f"{ours} ({100 * place['behind_first']:+.1f} %)"
    return f"{place['first']} ({100 * place['behind_first']:+.1f} %)"


def grid(
    places: Sequence[Mapping[str, Any]], text: Mapping[tuple[Any, ...], str]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a row for each machine and batch size, a column for each budget."""
    budgets = list(dict.fromkeys(one["budget"] for one in places))
    rows = []
    for hardware, batch in dict.fromkeys((one["hardware"], one["batch"]) for one in places):
        rows.append([hardware, str(batch), *(text.get((hardware, b, batch), "-") for b in budgets)])
    return ["hardware", "batch", *budgets], rows


def winners_grid(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Who is first in each cell."""
    places = results["winners"]
    text = {
        (one["hardware"], one["budget"], one["batch"]): place_text(one, results["ours"])
        for one in places
    }
    return grid(places, text)


def bound_grid(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """What share of the bound ours reaches in each cell."""
    places = results["winners"]
    text = {
        (one["hardware"], one["budget"], one["batch"]): percent(one["share_of_bound"])
        for one in places
    }
    return grid(places, text)


def rich_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int
) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 0), collapse_padding=True)
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def full_table(title: str, here: Mapping[str, Row], *, letters: int) -> Table:
    """The figures of one cell's systems, the fastest first; all that fit into so many letters."""
    shown = [one for one in FIGURES if letters >= WIDE_LETTERS or one[0] in NARROW]
    order = sorted(here.values(), key=lambda row: row["tpot_ms"] or 0.0)
    body = [[row["system"], *(told(row[key]) for _, key, told in shown)] for row in order]
    return rich_table(title, ["system", *(name for name, _, _ in shown)], body, 1)


def overview(rows: Sequence[Row], key: tuple[str, int], budgets: Sequence[str]) -> list[list[str]]:
    """TPOT and speed-up of every system at every budget, on one machine with one batch size."""
    hardware, batch = key
    here = [row for row in rows if (row["hardware"], row["batch"]) == (hardware, batch)]
    found = []
    for system in dict.fromkeys(row["system"] for row in here):
        by_budget = {row["budget"]: row for row in here if row["system"] == system}
        cells = []
        for budget in budgets:
            row = by_budget[budget]
            cells.append(f"{ms(row['tpot_ms'])} {times(row['speedup_decode'])}")
        found.append([system, *cells])
    return found


def show(results: Mapping[str, Any], *, console: Console) -> None:
    """Prints who is first, then every figure, or, of many cells, times and speed-ups."""
    rows, ours = results["rows"], results["ours"]
    columns, body = winners_grid(results)
    console.print(rich_table("First in each cell (median TPOT, bound left out)", columns, body, 2))
    counted = results["tally"]
    if counted["cells"]:
        console.print(
            f"{ours}: first in {counted['first']} of {counted['cells']} cells, within 2 % of first "
            f"in {counted['close']}, at worst {100 * counted['worst_behind_first']:+.1f} %; "
            f"at least {percent(counted['worst_share_of_bound'])} of the bound "
            f"({results['bound']})",
            highlight=False,
        )
    if len(rows) <= ROWS_SHOWN:
        for (hardware, budget, batch), here in cells_of(rows).items():
            title = f"{hardware}, budget {budget}, batch {batch} (bytes in MiB, of a token)"
            console.print(full_table(title, here, letters=console.width))
    else:
        budgets = list(dict.fromkeys(row["budget"] for row in rows))
        for key in dict.fromkeys((row["hardware"], row["batch"]) for row in rows):
            title = f"{key[0]}, batch {key[1]}: TPOT in ms, speed-up over {results['baseline']}"
            body = overview(rows, key, budgets)
            console.print(rich_table(title, ["system", *budgets], body, 1))
        console.print("All figures: results.json and report.html", highlight=False)
    for name, why in results["missing"].items():
        console.print(f"left out: {name}: {why}", highlight=False)
    console.print(
        f"{results['new_tokens']:,} generated held-out tokens of {results['trace']['dataset']}, "
        f"experts of {results['shape']['name']}; simulated, so that equal runs give equal figures",
        highlight=False,
    )
