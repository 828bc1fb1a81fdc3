"""The figures of docs/, drawn from the committed results."""

from collections.abc import Container, Iterator
from dataclasses import fields
from pathlib import Path

from benchmarks.process import ROOT
from benchmarks.reports import Document, print_line, read_document
from benchmarks.tables.markdown import share
from benchmarks.tables.systems import SHORT, read_live
from runtime.tools.bench.html_report import draw_times, time_table
from runtime.tools.bench.rows import BenchRow
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import Provenance

DOCS = Path("docs/images")


def list_pages(refused: Container[str] = ()) -> Iterator[tuple[Path, HtmlReport]]:
    """Yields a folder and the sections whose figures are written there.

    Args:
        refused: results whose figures are left out.
    """
    for folder, result, build_page in (
        (DOCS, "bench", live_tpot),
        (DOCS / "simulated", "evaluate", simulated_latency),
        (DOCS, "train", forecasts),
    ):
        if result not in refused:
            yield folder, build_page(read_document(result))


def live_tpot(report: Document) -> HtmlReport:
    """Returns TPOT against the budget of a few systems, live."""
    known = {field.name for field in fields(BenchRow)}
    rows = [
        BenchRow(**{key: value for key, value in row.items() if key in known})
        for row in read_live(report)
        if row["system"] in SHORT
    ]
    rows.sort(key=lambda row: (SHORT.index(row.system), share(row.budget)))
    hardware = report["machine"]["hardware"]
    page = HtmlReport("Live", provenance=Provenance(**report.origin))
    page.add(
        f"TPOT against the memory budget: live, {hardware['cores']} cores of "
        f"{hardware['processor']}, disk",
        time_table(rows, "budget", "tpot_mean_seconds", "TPOT ms"),
        draw_times(
            *("budget", "TPOT ms"),
            xlabel="memory for experts, share of all",
            ylabel="mean time per output token, ms",
        ),
        name="tpot-against-budget",
        inches=(8.0, 4.0),
    )
    return page


def simulated_latency(report: Document) -> HtmlReport:
    """Returns TPOT and TTFT against the budget of every system on simulated machines."""
    # Late: the training packages.
    from train.evaluate.report import add_budgets, add_known

    page = HtmlReport("Simulated", provenance=Provenance(**report.origin))
    add_budgets(page, report, 1)
    add_known(page, report)
    return page


def forecasts(report: Document) -> HtmlReport:
    """Returns the predictors' accuracy by layer and the eviction policies' hit rates."""
    from train.report.forecasts import accuracy_by_layer
    from train.report.serving import hit_rate

    page = HtmlReport("Forecasts", provenance=Provenance(**report.origin))
    accuracy_by_layer(page, report["predictors"])
    tables = report["keeping"]["hit_rates"]["generated, per-layer"]
    hit_rate(page, tables, num_tokens=500)
    return page


def draw_figures(refused: Container[str]) -> None:
    """Draws the figures of results that are not refused, each with a CSV of its numbers."""
    for folder, page in list_pages(refused):
        for path in page.write_figures(ROOT / folder, "svg"):
            print_line(str(path.relative_to(ROOT)))
