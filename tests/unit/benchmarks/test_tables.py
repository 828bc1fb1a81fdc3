"""The README's table of speeds, and the origin of results under their tables."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reports
from benchmarks.papers.config import ScalingConfig
from benchmarks.process import ROOT
from benchmarks.tables import markdown, peers, systems
from benchmarks.tables.pages import BEGIN, END, list_tables


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


def test_speed_table__is_led_by_what_is_simulated() -> None:
    own, _ = read_tables(peers.speed_table())
    at_25 = {
        label: float(cells[own[""].index("25%")].removesuffix(" ms"))
        for label, cells in own.items()
        if "ms" in cells[0]
    }
    assert min(at_25, key=at_25.get).startswith("the bound")
    assert "**moecast**" in at_25


def test_speed_table__compares_other_programs_with_moecast_in_their_run() -> None:
    own, others = read_tables(peers.speed_table())
    assert {
        "**moecast**",
        "Accelerate, disk offload",
        "llama.cpp, weights mapped from the file",
    } <= {*others}
    assert not {*others} & {*own} - {"", "---", "**moecast**"}
    assert all(len(cells) == len(others[""]) for cells in others.values())


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
        _, _, rest = (ROOT / path).read_text().partition(BEGIN)
        written = rest.partition(END)[0].strip()
        expected = "\n".join(line for lines in sections for line in lines).strip()
        assert written == expected, f"{path}: run `python -m benchmarks tables`"
