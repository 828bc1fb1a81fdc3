"""Figures of what Klotski's figure 14 and table 3 show, measured here."""

from collections.abc import Sequence

from benchmarks.klotski.rows import Point, list_completed, live_points, simulated_points
from benchmarks.reports import Document
from predictors.table import Table
from runtime.tools.report.figures import (
    collect,
    draw_bars,
    draw_panels,
    ramp_colors,
    rows_height,
)
from runtime.tools.report.html_report import HtmlReport, slug
from runtime.tools.report.provenance import Provenance

ABLATION = ("simple pipeline", "+ multi batches", "+ only hot experts", "+ order (klotski)")


def build_page(report: Document) -> HtmlReport:
    """Returns a section with the figures."""
    rows = list_completed(report)
    page = HtmlReport(
        "Batches in groups",
        f"klotski on {report.model}, {report.budget} budget",
        provenance=Provenance(**report.origin),
    )
    by_name = {row.name: row for row in rows}
    add_groups(page, "throughput-by-group-size", "Throughput by group size", live_points(rows))
    add_bars(page, [by_name[name] for name in ABLATION if name in by_name])
    for environment, points in simulated_points(report.simulated).items():
        name = f"throughput-by-group-size-simulated-{slug(environment)}"
        add_groups(page, name, f"Throughput by group size, simulated: {environment}", points)
    return page


def add_groups(page: HtmlReport, name: str, heading: str, points: Sequence[Point]) -> None:
    """Adds a line of throughput for each batch size (Klotski, figure 14)."""
    if not points:
        return
    num_batches = len({batch for batch, _, _ in points})
    page.add(
        heading,
        Table.of(["batch", "n", "tokens/s"], points),
        lambda figure, records: draw_panels(
            figure,
            {"": collect(records, "n", "tokens/s", by="batch")},
            xlabel="n, batches in a group",
            ylabel="throughput, tokens/s",
            labels=True,
            colors=ramp_colors(num_batches),
            legend="batch size",
            ylim=(0, None),
        ),
        name=name,
        note="A line for each batch size.",
    )


def add_bars(page: HtmlReport, rows: Sequence[Document]) -> None:
    """Adds the throughput of each step (Klotski, table 3)."""
    if not rows:
        return
    page.add(
        "Throughput as the techniques of klotski are added",
        Table.of(["step", "tokens/s"], [(row.name, row.tokens_per_second) for row in rows]),
        lambda figure, records: draw_bars(
            figure,
            {"": {record["step"]: record["tokens/s"] for record in records}},
            xlabel="throughput, tokens/s",
        ),
        name="throughput-by-technique",
        inches=(8.0, rows_height(len(rows))),
    )
