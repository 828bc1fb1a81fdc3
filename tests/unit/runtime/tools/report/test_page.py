"""The page of results: one file, escaped, with every figure's PNG and CSV in its folder."""

import base64
import csv
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlparse

import pytest

from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.table_cells import format_cell, numeric_columns, table_html


class Links(HTMLParser):
    """Everything that a browser would load or follow, the page's text, and its tags' order."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.targets += [
            value for key, value in attrs if key in ("src", "href", "srcset", "data", "action")
        ]
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text())
    assert not links.open
    return links


def draw(figure) -> None:
    axes = figure.subplots()
    axes.plot([1, 2, 3], [0.25, None, 1.0], label="<one> & two")
    axes.legend()


def sample() -> HtmlReport:
    page = HtmlReport("A <b>title</b>", "of `code` & more")
    page.text("What & why", ["<script>alert(1)</script>"])
    page.table(
        "All of it",
        ["name <i>", "share", "speed"],
        [["a,b", 0.123456, "1.31x"], ["<img src=x>", None, None]],
        note="A note.",
    )
    page.figure("curve", "A curve", draw, ["x", "y"], [[1, 0.25], [2, None], [3, 1 / 3]])
    return page


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample().write(tmp_path_factory.mktemp("page") / "deep" / "report")


def test_page__loads_nothing_and_escapes_all_text(written: Path) -> None:
    html, links = written.read_text(), read(written)
    assert {urlparse(one).scheme or one[0] for one in links.targets} <= {"data", "#"}
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html
    assert "<script" not in html
    assert "<img src=x>" in links.text
    assert "<script>alert(1)</script>" in links.text
    for svg in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", html):
        drawing = base64.b64decode(svg).decode()
        assert not re.search(r"(href|src)=\"(?!#)", drawing)


def test_page__both_colour_schemes_are_drawn(written: Path) -> None:
    html = written.read_text()
    light, dark = (
        re.search(pattern, html)[1]
        for pattern in (r'<img src="([^"]+)', r'\(prefers-color-scheme: dark\)" srcset="([^"]+)')
    )
    assert light != dark


def test_page__numbers_line_up_and_missing_ones_are_dashes(written: Path) -> None:
    html = written.read_text()
    assert '<td class="number">0.123</td><td class="number">1.31x</td>' in html
    assert '<td class="number none">–</td>' in html
    assert "<td>a,b</td>" in html


def test_page__each_png_has_a_csv_with_full_values(written: Path) -> None:
    with written.with_name("curve.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["x", "y"], ["1", "0.25"], ["2", ""], ["3", repr(1 / 3)]]
    with written.with_name("all-of-it.csv").open(newline="") as file:
        assert next(iter(csv.DictReader(file)))["share"] == "0.123456"
    assert written.with_name("curve.png").read_bytes().startswith(b"\x89PNG")
    assert {one.suffix for one in written.parent.iterdir()} == {".html", ".png", ".csv"}


def test_page__its_links_carry_the_files(written: Path) -> None:
    links = read(written)
    carried = [one.partition("base64,")[2] for one in links.targets if ";base64," in one]
    inside = {base64.b64decode(one) for one in carried}
    for name in ("curve.png", "curve.csv", "all-of-it.csv"):
        assert written.with_name(name).read_bytes() in inside


def test_page__the_same_results_are_the_same_bytes(written: Path, tmp_path: Path) -> None:
    assert sample().write(tmp_path).read_bytes() == written.read_bytes()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.00012, "0.00012"),
        (0.86234, "0.862"),
        (17.34, "17.3"),
        (12_345.6, "12,345.6"),
        (12_345, "12,345"),
        (True, "yes"),
        ("as it is", "as it is"),
    ],
)
def test_shown__is_short(value, text: str) -> None:
    assert format_cell(value) == text


def test_table__a_column_has_as_many_decimals_everywhere() -> None:
    html = table_html(["us", "share"], [[0.1, -0.0008], [12_345.6, 0.5], [3, None]])
    assert re.findall(r"<td[^>]*>([^<]*)", html) == [
        *("0.1", "-0.001"),
        *("12,345.6", "0.500"),
        *("3", "–"),
    ]


def test_numeric_columns__units_are_numbers_and_names_are_not() -> None:
    rows = [["skip-2", "250 us", "33 %", None, 3], ["2 of them", "1,024 us", None, None, 4.0]]
    assert numeric_columns(list("abcde"), rows) == [False, True, True, False, True]


def test_import__leaves_matplotlib_alone() -> None:
    code = "import sys, runtime.tools.report.html_report; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
