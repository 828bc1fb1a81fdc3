"""The tables and figures of the pages, their marks, and the origin of results under the tables."""

from pathlib import Path

import pytest

from benchmarks import reports
from benchmarks.config import TablesConfig
from benchmarks.papers.config import ScalingConfig
from benchmarks.process import ROOT
from benchmarks.reports import Document, read_document
from benchmarks.tables import markdown, pages, peers, systems
from benchmarks.tables.figures import list_pages
from benchmarks.tables.origins import refuse_unclean
from predictors.errors import MoecastError


def make_part(name: str, *rows: tuple[str, str, int, int | None, float]) -> Document:
    """A part of the other programs' results; rows: peer, budget, threads, KiB, tokens/s."""
    keys = ("peer", "budget", "threads", "read_ahead_kib", "tokens_per_second")
    return Document(
        origin={"command": "python -m benchmarks peers", "revision": "a" * 40}, model="inflated",
        format=name, rows=[Document(zip(keys, row, strict=True)) for row in rows],
    )  # fmt: skip


def test_other_programs__stand_in_their_fastest_setting() -> None:
    part = make_part(
        "float32",
        ("moecast", "25%", 2, None, 10.0),
        ("moecast", "25%", 1, None, 20.0),
        ("moecast", "100%", 1, None, 50.0),
        ("llama-cpp", "100%", 2, 8192, 80.0),
        ("llama-cpp-in-memory", "100%", 1, None, 125.0),
        ("llama-cpp-in-memory", "100%", 2, None, 100.0),
        ("llama-cpp", "25%", 1, 512, 4.0),
        ("llama-cpp", "25%", 2, 128, 8.0),
        ("llama-cpp", "25%", 2, 512, 5.0),
    )
    pairs = peers.compare_rows(part)
    found = [(own.tokens_per_second, other.peer, other.tokens_per_second) for own, other in pairs]
    assert found == [(20.0, "llama-cpp", 8.0), (50.0, "llama-cpp-in-memory", 125.0)]


def test_gguf_formats__are_compared_with_the_fastest_other_program() -> None:
    both = make_part(
        "q4_0",
        ("moecast", "25%", 1, None, 30.0),
        ("on-demand", "25%", 1, None, 40.0),
        ("llama-cpp", "25%", 1, 128, 10.0),
        ("ik-llama-cpp", "25%", 2, 128, 20.0),
        ("ik-llama-cpp", "25%", 2, 512, 10.0),
    )
    assert peers.describe_quantised(both) == (
        "* q4_0, the included model enlarged to 2 GiB of float32: at 25% moecast is 1.5 times as "
        "fast as ik_llama.cpp."
    )
    assert peers.describe_quantised(
        make_part(
            "q8_0",
            ("on-demand", "25%", 1, None, 5.0),
            ("on-demand", "100%", 1, None, 10.0),
            ("llama-cpp", "100%", 2, 8192, 30.0),
            ("llama-cpp-in-memory", "100%", 2, None, 40.0),
        )
    ).endswith(": where everything fits llama.cpp is 4.0 times as fast as moecast (`on-demand`).")


def test_bounds__that_a_run_has_beaten_are_left_out() -> None:
    def row(budget: str, system: str, seconds: float) -> dict:
        figures = {"tpot_mean_seconds": seconds, "simulated": system in ("oracle", "bound")}
        return {"budget": budget, "system": system, **figures}

    rows = [
        row("50%", "moecast", 0.06), row("50%", "bound", 0.05), row("75%", "bound", 0.05),
        row("100%", "moecast", 0.04), row("100%", "promoe", 0.07), row("100%", "bound", 0.05),
    ]  # fmt: skip
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
    origin = document.origin
    assert origin.command == "python -m benchmarks scaling seed=3 trace=trace"
    assert origin.revision
    assert " cores of " in (origin.machine or "")
    line, empty = markdown.origin_lines(document)
    assert line.startswith(f"`{origin.command}` · {origin.date} · revision ")
    assert empty == ""


def test_tables__stand_above_their_origin() -> None:
    for write, names in pages.TABLES.items():
        lines = write(*map(read_document, names))
        has_table = any(line.startswith("| ---") for line in lines)
        assert has_table <= any(" · revision " in line for line in lines), write.__name__


def test_tables__are_those_of_the_committed_results() -> None:
    refused = refuse_unclean()
    written = []
    for page in pages.PAGES:
        text = (ROOT / page).read_text()
        assert pages.fill_page(text, refused) == text, f"{page}: run `python -m benchmarks tables`"
        marked = list(pages.MARKED.finditer(text))
        assert text.count("<!--end-->") == len(marked), page
        written += [found[2] for found in marked]
    assert sorted(written) == sorted(pages.FUNCTIONS)


def test_tables__of_refused_results_stay_as_they_are(tmp_path, monkeypatch) -> None:
    page = tmp_path / "page.md"
    rest = "\nas it was\n\n<!--end-->\n"
    page_text = f"# Page\n\n<!--live_table-->{rest}<!--robustness_table-->{rest}"
    page.write_text(page_text)
    monkeypatch.setattr(pages, "PAGES", [page])
    monkeypatch.setattr(pages, "refuse_unclean", lambda: ["bench"])
    monkeypatch.setattr(pages, "warn_of_changes", lambda: None)
    monkeypatch.setattr(pages, "draw_figures", lambda _: None)
    with pytest.raises(MoecastError, match=r"^tables and figures of bench stay as"):
        pages.run_tables(TablesConfig())
    kept, _, written = page.read_text().partition("<!--robustness_table-->\n")
    assert kept == page_text.partition("<!--robustness")[0]
    assert written.startswith("The server as a separate process")
    assert written.endswith("\n\n<!--end-->\n")


def test_figures__are_those_of_the_committed_results() -> None:
    expected: dict[Path, str] = {}
    for folder, page in list_pages():
        for section in page.sections:
            if section.draw is not None:
                expected[folder / f"{section.name}.csv"] = section.csv().decode()
                assert (ROOT / folder / f"{section.name}.svg").stat().st_size < 200_000
        assert page.provenance is not None
        assert None not in (page.provenance.date, page.provenance.revision)
    for path, values in expected.items():
        assert (ROOT / path).read_text() == values, f"{path}: run `python -m benchmarks tables`"
    folders = {ROOT / path.parent for path in expected}
    tables = {path for folder in folders for path in folder.glob("*.csv")}
    assert tables == {ROOT / path for path in expected}
