"""Figures of what Klotski's figure 14 and table 3 show, measured here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.klotski.rows import (
    KlotskiReport,
    LiveRow,
    Point,
    live_points,
    simulated_points,
)
from runtime.tools.report.figures import hue_color, ramp_colors
from runtime.tools.report.html_report import HtmlReport, slug
from runtime.tools.report.line_labels import label_lines
from runtime.tools.report.provenance import Provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "os^Dv<>pPX"
ABLATION = ("simple pipeline", "+ multi batches", "+ only hot experts", "+ order (klotski)")


def build_page(report: KlotskiReport, provenance: Provenance | None = None) -> HtmlReport:
    """Returns a section with the figures."""
    rows = report.completed
    page = HtmlReport(
        "Batches in groups",
        f"klotski on {report.model}, {report.budget} budget",
        provenance=provenance,
    )
    by_name = {row.name: row for row in rows}
    add_groups(page, "throughput-by-group-size", "Throughput by group size", live_points(rows))
    add_bars(page, [by_name[name] for name in ABLATION if name in by_name])
    for environment, points in simulated_points(report.simulated or []).items():
        name = f"throughput-by-group-size-simulated-{slug(environment)}"
        add_groups(page, name, f"Throughput by group size, simulated: {environment}", points)
    return page


def add_groups(page: HtmlReport, name: str, heading: str, points: Sequence[Point]) -> None:
    """Adds a line of throughput for each batch size (Klotski, figure 14)."""
    if not points:
        return

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        batches = list(dict.fromkeys(batch for batch, _, _ in points))
        for batch, color, marker in zip(batches, ramp_colors(len(batches)), MARKERS, strict=False):
            line = [(n, speed) for size, n, speed in points if size == batch]
            label = f"batch size {batch}"
            axes.plot(*zip(*line, strict=True), color=color, marker=marker, label=label)
        axes.set(xlabel="n, batches in a group", ylabel="throughput, tokens/s", ylim=(0, None))
        axes.set_xticks(sorted({n for _, n, _ in points}))
        label_lines(axes)

    page.figure(name, heading, draw, ["batch", "n", "tokens/s"], [list(point) for point in points])


def add_bars(page: HtmlReport, rows: Sequence[LiveRow]) -> None:
    """Adds the throughput of each step (Klotski, table 3)."""
    if not rows:
        return
    names = [row.name for row in rows]
    speeds = [row.tokens_per_second for row in rows]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        bars = axes.barh(names, speeds, 0.66, color=hue_color("teal"))
        axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=4)
        axes.set_xlabel("throughput, tokens/s")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")

    page.figure(
        "throughput-by-technique",
        "Throughput as the techniques of klotski are added",
        draw,
        ["step", "tokens/s"],
        [list(pair) for pair in zip(names, speeds, strict=True)],
        inches=(8.0, 1.0 + 0.42 * len(names)),
    )
