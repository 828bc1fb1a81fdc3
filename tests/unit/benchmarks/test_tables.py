"""The README's table of speeds, and the origin of results under their tables."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reports
from benchmarks.papers.config import ScalingConfig
from benchmarks.process import ROOT
from benchmarks.tables import markdown, peers, systems
from benchmarks.tables.pages import BEGIN, END, list_tables, replace_tables


def read_tables(lines: list[str]) -> list[dict[str, list[str]]]:
    """Rows of each table: the cells after the first by the first."""
    tables: list[dict[str, list[str]]] = []
    for before, line in pairwise(["", *lines]):
        if line.startswith("|"):
            if not before.startswith("|"):
                tables.append({})
            label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            tables[-1][label] = cells
    return tables


def test_gain__is_that_of_the_short_table() -> None:
    (own,) = read_tables(peers.speed_table())
    place = own[""].index(peers.GAIN_BUDGET)
    times = [int(cells[place].removesuffix(" ms")) for cells in own.values() if "ms" in cells[0]]
    assert len(times) <= 4
    sentence, _, picture = peers.gain()
    moecast, *_, on_demand = times
    assert f"a token takes {moecast} ms, not {on_demand} ms" in sentence
    assert f" {on_demand / moecast:.1f} times as fast" in sentence
    assert picture.startswith("![")


def test_speed_table__says_where_another_program_is_faster() -> None:
    lines = peers.speed_table()
    assert any("the fastest, Transformers with its weights mapped" in line for line in lines)
    assert any("where everything fits llama.cpp is " in line for line in lines)


def test_bounds__that_a_run_has_beaten_are_left_out() -> None:
    def row(budget: str, system: str, seconds: float) -> dict[str, Any]:
        simulated = system in ("oracle", "bound")
        figures = {"tpot_mean_seconds": seconds, "simulated": simulated}
        return {"budget": budget, "system": system, **figures}

    rows = [
        row("50%", "moecast", 0.06),
        row("50%", "bound", 0.05),
        row("100%", "moecast", 0.04),
        row("100%", "promoe", 0.07),
        row("100%", "bound", 0.05),
        row("75%", "bound", 0.05),
    ]
    assert systems.find_beaten_bounds(rows) == ["100%"]


def test_results__have_their_origin(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reports, "RESULTS", tmp_path)
    trace, output = Path("/home/someone/trace"), tmp_path / "scaling.json"
    config = ScalingConfig(trace=trace, output=output, seed=3)
    reports.write_report(config, figure=2.5)
    document = reports.read_document("scaling")
    assert (document.figure, document.trace, document.origin.seed) == (2.5, "trace", 3)
    with pytest.raises(ValueError, match="nan"):
        reports.write_report(config, figure=float("nan"))
    assert reports.read_document("scaling") == document
    origin = markdown.read_origin("scaling")
    assert origin.command == "python -m benchmarks scaling seed=3 trace=trace"
    assert origin.seed == 3
    assert origin.revision
    assert " cores of " in (origin.machine or "")
    line, empty = markdown.origin_line("scaling")
    assert line.startswith(f"`{origin.command}` · {origin.date} · revision ")
    assert empty == ""


def test_tables__stand_above_their_origin() -> None:
    for path, sections in list_tables().items():
        for lines in sections:
            has_table = any(line.startswith("| ---") for line in lines)
            assert has_table == any(" · revision " in line for line in lines), (path, lines[:1])


def test_tables__are_those_of_the_committed_results() -> None:
    for path, sections in list_tables().items():
        page = (ROOT / path).read_text()
        new = replace_tables(page, sections)
        assert new == page, f"{path}: run `python -m benchmarks tables`"


def test_replace__gives_each_pair_of_marks_its_sections() -> None:
    page = f"a\n{BEGIN}\nold\n{END}\nb\n{BEGIN}\n{END}\nc\n"
    text = replace_tables(page, [["1"], ["2"], ["3"]])
    assert text == f"a\n{BEGIN}\n1\n{END}\nb\n{BEGIN}\n2\n3\n{END}\nc\n"
