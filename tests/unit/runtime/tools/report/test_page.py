"""The page of results: one file, escaped, with every figure's PNG and CSV in its folder."""

import base64
import csv
import re
from html.parser import HTMLParser
from urllib.parse import urlparse

import pytest

from predictors.table import Table
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.series_styles import STYLES
from tests.builders.processes import run_python


class Links(HTMLParser):
    """Everything that a browser would load or follow, the page's text, and its tags' order."""

    def __init__(self) -> None:
        super().__init__()
        self.targets, self.open, self.text = list[str](), list[str](), ""

    def handle_starttag(self, tag, attrs):
        loading = ("src", "href", "srcset", "data", "action")
        self.targets += [value for key, value in attrs if key in loading]
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path) -> Links:
    links = Links()
    links.feed(path.read_text())
    assert not links.open
    return links


def draw(figure, records) -> None:
    axes = figure.subplots()
    axes.plot([row["x"] for row in records], [row["y"] for row in records], label="<one> & two")
    axes.legend()


def sample() -> HtmlReport:
    page = HtmlReport("A <b>title</b>", "of `code` & more")
    page.add("What & why", note="<script>alert(1)</script>\n`</code>`")
    rows = [["a,b", 0.123456, "1.31x"], ["<img src=x>", None, None]]
    page.add("All of it", Table.of(["name <i>", "share", "speed"], rows), note="A note.")
    page.add("Systems", Table.of(["system"], [["moecast"], ["<script>"]]))
    curve = Table.of(["x", "y"], [[1, 0.25], [2, None], [3, 1 / 3]])
    page.add("A <u>curve</u>", curve, draw, name="curve")
    return page


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return sample().write(tmp_path_factory.mktemp("page") / "deep" / "report")


def test_page__loads_nothing_and_escapes_all_text(written) -> None:
    html, links = written.read_text(), read(written)
    assert {urlparse(one).scheme or one[0] for one in links.targets} <= {"data", "#"}
    for loads in ("http:", "https:", "url(", "@import", "<script"):
        assert loads not in html
    for text in ("<img src=x>", "<script>alert(1)</script>", "</code>", "A <u>curve</u>"):
        assert text in links.text


def test_page__marks_names_with_the_color_of_their_line(written) -> None:
    html = written.read_text()
    assert html.count('class="swatch"') == 1
    assert f'style="background: {STYLES["moecast"].color}"></i>moecast' in html


def test_page__numbers_line_up_and_missing_ones_are_dashes(written) -> None:
    html = written.read_text()
    assert re.findall(r'<td class="number">(.*)</td>', html) == ["0.1235", "1.31x"]
    assert (html.count('<td class="number none">-</td>'), html.count("<td>a,b</td>")) == (2, 1)


def test_page__each_png_has_a_csv_with_full_values(written) -> None:
    with written.with_name("curve.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["x", "y"], ["1", "0.25"], ["2", ""], ["3", repr(1 / 3)]]
    with written.with_name("all-of-it.csv").open(newline="") as file:
        assert next(iter(csv.DictReader(file)))["share"] == "0.123456"
    assert written.with_name("curve.png").read_bytes().startswith(b"\x89PNG")
    assert {one.suffix for one in written.parent.iterdir()} == {".html", ".png", ".csv"}


def test_page__its_links_carry_the_files(written) -> None:
    carried = [one.partition("base64,")[2] for one in read(written).targets if ";base64," in one]
    inside = {base64.b64decode(one) for one in carried}
    for name in ("curve.png", "curve.csv", "all-of-it.csv"):
        assert written.with_name(name).read_bytes() in inside


def test_page__the_same_results_are_the_same_bytes(written, tmp_path) -> None:
    assert sample().write(tmp_path).read_bytes() == written.read_bytes()


def test_import__leaves_matplotlib_alone() -> None:
    code = "import sys, runtime.tools.report.html_report; assert 'matplotlib' not in sys.modules"
    run_python("-c", code)
