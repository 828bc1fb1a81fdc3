"""Tables: figures are whole at every width of a terminal, exact in CSV, and none is invented."""

import csv
import io
import re
from dataclasses import dataclass

import pytest
from rich.console import Console

from predictors.table import Table, TableColumn, format_or_dash, mebibytes, milliseconds

TABLE = Table.of(
    ["budget", "system", "TPOT", "p95", "p99", "speed-up", "hits", "memory"],
    [
        ["25%", "moe-infinity-request", "1,234.56", "1,300.25", "1,400.75", "1.31x", "33 %", "418"],
        ["25%", "oracle", "12.34", "13.05", "14.95", "5.21x", "97 %", None],
    ],
    title="all systems",
    left=2,
    importance=["TPOT", "hits", "speed-up"],
)


def printed(table: Table, width: int | None) -> str:
    """Return what a terminal of this width shows; None: what a file gets."""
    file = io.StringIO()
    is_terminal = width is not None
    table.print(Console(file=file, width=width, force_terminal=is_terminal, color_system=None))
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
def test_print__cuts_no_figure_at_any_width(width: int) -> None:
    text = printed(TABLE, width)
    assert all(len(line) <= width for line in text.splitlines()), text
    assert "…" not in text
    figures = {cell for row in TABLE.rows for cell in row[2:]}
    shown = re.findall(r"[\d,.]+(?:x| %)?(?=\s|$)", text.partition("left out")[0].split("─", 1)[1])
    assert shown
    assert set(shown) <= figures | {"25"}, text


def test_print__the_most_important_columns_stay() -> None:
    text = " ".join(printed(TABLE, 60).split())
    assert "budget system TPOT speed-up hits" in text
    assert "left out for lack of width: p95, p99, memory; results.json has them" in text
    assert "left out" not in printed(TABLE, 200)


def test_print__a_file_gets_every_column_in_one_line() -> None:
    lines = printed(TABLE, None).splitlines()
    assert lines[1].split() == [column.heading for column in TABLE.columns]
    assert lines[3].split()[:4] == ["25%", "moe-infinity-request", "1,234.56", "1,300.25"]
    # The budget is written where it changes.
    assert lines[4].split() == ["oracle", "12.34", "13.05", "14.95", "5.21x", "97", "%", "-"]


def test_print__long_names_are_folded_before_figures_go() -> None:
    text = printed(TABLE, 24)
    assert "1,234.56" in text
    assert "moe-infinity-request" not in text
    assert "moe-" in text


def test_print__no_cell_controls_the_terminal() -> None:
    text = printed(Table.of(["name\x1b[2J"], [["[red]a\x1b[1m\nb"]], title="\x07"), 80)
    assert "[red]a\\x1b[1m b" in text
    assert not {"\x1b", "\x07"} & set(text)


@dataclass
class Timed:
    system: str
    tpot_ms: float | None
    moved: tuple[int, int] = (0, 2**20)


COLUMNS = [
    TableColumn("system"),
    TableColumn("TPOT, ms", "tpot_ms", milliseconds),
    TableColumn("bytes", lambda row: row.moved[1], mebibytes),
    TableColumn("both", "moved"),
]


def test_table__has_exact_values_in_csv_and_rounded_ones_in_markdown() -> None:
    table = Table(columns=COLUMNS, rows=[Timed("a,b|c", 1 / 3), Timed("two", None)])
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        ["system", "tpot_ms", "bytes", "moved"],
        ["a,b|c", repr(1 / 3), "1048576", "[0, 1048576]"],
        ["two", "", "1048576", "[0, 1048576]"],
    ]
    assert table.markdown() == [
        "| system | TPOT, ms | bytes | both |",
        "| --- | --- | --- | --- |",
        "| a,b\\|c | 0.33 | 1.0 | (0, 1048576) |",
        "| two | - | 1.0 | (0, 1048576) |",
    ]
    mapping = Table(columns=COLUMNS[:2], rows=[{"system": "a", "tpot_ms": 2.0}])
    assert mapping.records() == [{"system": "a", "tpot_ms": 2.0}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0.000"), (0.00012, "0.0001200"), (0.86234, "0.8623"), (17.3, "17.30"),
        (12_345.6, "12,346"), (12_345, "12,345"), (True, "yes"), ("as it is", "as it is"),
    ],
)  # fmt: skip
def test_format__is_short(value: object, text: str) -> None:
    assert format_or_dash(value) == text
