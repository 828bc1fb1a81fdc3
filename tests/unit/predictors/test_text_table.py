"""Tables of a terminal: figures are whole at every width, and what is left out is named."""

import io
import re

import pytest
from rich.console import Console

from predictors.text_table import TextTable

TABLE = TextTable(
    title="all systems",
    columns=["budget", "system", "TPOT", "p95", "p99", "speed-up", "hits", "memory"],
    rows=[
        ["25%", "moe-infinity-request", "1,234.56", "1,300.25", "1,400.75", "1.31x", "33 %", "418"],
        "simulated",
        ["", "oracle", "12.34", "13.05", "14.95", "5.21x", "97 %", "-"],
    ],
    left=2,
    importance=["TPOT", "hits", "speed-up"],
)


def printed(table: TextTable, width: int | None) -> str:
    """Return what a terminal of this width shows; None: what a file gets."""
    file = io.StringIO()
    console = Console(file=file, color_system=None)
    if width is not None:
        console = Console(file=file, width=width, force_terminal=True, color_system=None)
    table.print(console)
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
def test_print__cuts_no_figure_at_any_width(width: int) -> None:
    text = printed(TABLE, width)
    assert all(len(line) <= width for line in text.splitlines()), text
    assert "…" not in text
    figures = {cell for row in TABLE.rows if not isinstance(row, str) for cell in row[2:]}
    body = text.partition("left out")[0].split("─", 1)[1]
    shown = re.findall(r"[\d,.]+(?:x| %)?(?=\s|$)", body)
    assert shown
    assert set(shown) <= figures | {"25"}, text


def test_print__the_most_important_columns_stay() -> None:
    text = " ".join(printed(TABLE, 60).split())
    assert "budget system TPOT speed-up hits" in text
    assert "left out for lack of width: p95, p99, memory; results.json has them" in text
    assert "left out" not in printed(TABLE, 200)


def test_print__a_file_gets_every_column_in_one_line() -> None:
    lines = printed(TABLE, None).splitlines()
    assert lines[1].split() == list(TABLE.columns)
    assert lines[3].split()[:4] == ["25%", "moe-infinity-request", "1,234.56", "1,300.25"]


def test_print__long_names_are_folded_before_figures_go() -> None:
    text = printed(TABLE, 24)
    assert "1,234.56" in text
    assert "moe-infinity-request" not in text
    assert "moe-" in text
