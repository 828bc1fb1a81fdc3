"""The figures of docs/ and benchmarks/results/figures, drawn from the committed results."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from benchmarks.klotski.page import build_page as build_klotski_page
from benchmarks.process import ROOT
from benchmarks.reports import print_line, read_document
from benchmarks.serving.distributions import build_page as build_arrivals_page
from benchmarks.tables.markdown import read_origin
from benchmarks.tables.systems import SHORT, read_live
from runtime.tools.bench.html_report import draw_times, time_table
from runtime.tools.bench.rows import BenchRow
from runtime.tools.report.html_report import HtmlReport

DOCS = Path("docs/images")
FIGURES = Path("benchmarks/results/figures")


def list_pages() -> Iterator[tuple[Path, str, HtmlReport]]:
    """Yields folder, file type and the sections whose figures are written there."""
    yield DOCS, "svg", live_tpot()
    yield DOCS / "simulated", "svg", simulated_latency()
    yield DOCS, "svg", forecasts()
    klotski = build_klotski_page(read_document("klotski"), read_origin("klotski"))
    yield FIGURES / "klotski", "png", klotski
    replayed = read_document("serving").arrivals
    arrivals = build_arrivals_page(replayed, read_origin("serving", "arrivals"))
    yield FIGURES / "arrivals", "png", arrivals


def live_tpot() -> HtmlReport:
    """Returns TPOT against the budget of a few systems, live."""
    known = {field.name for field in fields(BenchRow)}
    rows = [
        BenchRow(**{key: value for key, value in row.items() if key in known})
        for row in read_live()
        if row["system"] in SHORT
    ]
    rows.sort(key=lambda row: (SHORT.index(row.system), float(row.budget.rstrip("%"))))
    hardware = read_document("bench")["machine"]["hardware"]
    page = HtmlReport("Live", provenance=read_origin("bench"))
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


def simulated_latency() -> HtmlReport:
    """Returns TPOT and TTFT against the budget of every system on simulated machines."""
    # Late: the training packages.
    from train.evaluate.figures import add_budgets, add_known

    page = HtmlReport("Simulated", provenance=read_origin("evaluate"))
    results = read_document("evaluate")
    add_budgets(page, results, 1)
    add_known(page, results)
    return page


def forecasts() -> HtmlReport:
    """Returns the predictors' accuracy by layer and the eviction policies' hit rates."""
    from train.report.forecasts import accuracy_by_layer
    from train.report.serving import hit_rate

    results = read_document("train")
    page = HtmlReport("Forecasts", provenance=read_origin("train"))
    accuracy_by_layer(page, results["predictors"])
    tables = results["keeping"]["hit_rates"]["generated, per-layer"]
    hit_rate(page, tables, num_tokens=500)
    return page


def draw_figures() -> None:
    """Draws all figures, each with a CSV of its numbers."""
    for folder, kind, page in list_pages():
        for path in page.write_figures(ROOT / folder, kind):
            print_line(str(path.relative_to(ROOT)))
