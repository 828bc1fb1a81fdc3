"""The origin of figures: one line that says how the numbers were made."""

import json

import pytest

from predictors.table import Table
from runtime.tools.report import provenance
from runtime.tools.report.html_report import HtmlReport

RECORD = {
    "command": "train", "started": "2026-11-22T06:31:31+00:00", "seed": 3,
    "argv": ["predictor=all", "run_dir=/home/me/run", "trace=/home/me/traces/one"],
    "git_revision": "d29fd0b11949a06597cd9c32772e051f2b80d95a-dirty",
}  # fmt: skip
LINE = "python -m train predictor=all trace=one · 2026-11-22 · revision d29fd0b119-dirty · seed 3"


def test_read__makes_a_line_of_the_runs_own_record(tmp_path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RECORD))
    assert provenance.read_provenance(tmp_path).line() == LINE


@pytest.mark.parametrize("content", [None, "{}"])
def test_read__is_none_without_a_record(tmp_path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert provenance.read_provenance(tmp_path) is None


KINDS = "other_kinds={chat: /data/chat,code: runs/code}"
ZOOS = "zoo=[s3://a/b,hf://c/d]"
SPELT = [
    ("train-reuse", ["x=1"], "python -m train reuse x=1"),
    ("train.evaluate", ["x=1"], "python -m train.evaluate x=1"),
    ("moecast-bench", ["x=1"], "moecast bench x=1"),
    # Only the last part of paths.
    ("moecast-train", ["trace=/data/traces/mine", "a=[/x/y]"], "moecast train trace=mine a=[y]"),
    ("moecast-train", [KINDS], "moecast train other_kinds={chat: chat,code: runs/code}"),
    ("zoo", [ZOOS], f"python -m zoo {ZOOS}"),
]


@pytest.mark.parametrize(("label", "given", "spelt"), SPELT)
def test_spell__is_the_command_as_typed(label: str, given: list[str], spelt: str) -> None:
    assert provenance.spell_command(label, given) == spelt


def test_line__leaves_out_what_is_not_known_and_cuts_long_commands() -> None:
    assert provenance.Provenance(command="moecast bench").line() == "moecast bench"
    line = provenance.Provenance(command="x" * 500, seed=0).line()
    assert line == "x" * (provenance.LONGEST_COMMAND - 1) + "… · seed 0"


def test_figures__have_title_and_origin(tmp_path) -> None:
    drawn = []

    def draw(figure, records) -> None:
        assert records == [{"x": 1}]
        figure.subplots().plot([1, 2])
        drawn.append(figure)

    page = HtmlReport("Page", provenance=provenance.Provenance(command="moecast bench", seed=1))
    page.add("A curve", Table.of(["x"], [[1]]), draw, name="curve")
    assert page.write_figures(tmp_path, "svg") == [tmp_path / "curve.svg"]
    assert {path.name for path in tmp_path.iterdir()} == {"curve.svg", "curve.csv"}
    assert drawn[0].get_suptitle() == "A curve"
    assert drawn[0].get_supxlabel() == "moecast bench · seed 1"
    assert "<code>moecast bench · seed 1</code>" in page.write(tmp_path).read_text()
