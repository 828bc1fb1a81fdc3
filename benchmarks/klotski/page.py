"""The report as a page: what Klotski's figures 12, 14 and 15 and table 3 show, measured here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.klotski.rows import (
    KlotskiReport,
    LiveRow,
    Point,
    live_points,
    simulated_points,
)
from predictors.units import GIB, MIB
from runtime.tools.report.figures import hue_color, muted_color, ramp_colors
from runtime.tools.report.html_report import HtmlReport, slug
from runtime.tools.report.line_labels import label_lines
from runtime.tools.report.provenance import Provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "os^Dv<>pPX"
ABLATION = ("simple pipeline", "+ multi batches", "+ only hot experts", "+ order (klotski)")


def build_page(report: KlotskiReport, provenance: Provenance | None = None) -> HtmlReport:
    """Builds the tables, and a figure for each of the paper's."""
    rows = report.completed
    page = HtmlReport(
        "Batches in groups",
        f"klotski on {report.model}, {report.budget} budget",
        provenance=provenance,
    )
    page.table("Variants", *variants_table(rows), note=NOTE)
    by_name = {row.name: row for row in rows}
    add_groups(page, "throughput-by-group-size", "Throughput by group size", live_points(rows))
    add_bars(page, [by_name[name] for name in ABLATION if name in by_name])
    compared = [by_name[name] for name in (ABLATION[0], ABLATION[-1]) if name in by_name]
    add_memory(page, [row for row in compared if row.memory])
    for row in compared:
        add_timeline(page, row)
    for environment, points in simulated_points(report.simulated or []).items():
        name = f"throughput-by-group-size-simulated-{slug(environment)}"
        add_groups(page, name, f"Throughput by group size, simulated: {environment}", points)
    return page


NOTE = (
    "Link: share of the steady state's time in which bytes move; compute: in which the computation "
    "does not wait for them; idle: neither. Reads: of one expert within one step of the group, at "
    "most. Extra: peak memory on top of weights and budget."
)


def variants_table(rows: Sequence[LiveRow]) -> tuple[list[str], list[list[Any]]]:
    """Returns columns, and a line for each variant."""
    columns = [
        "variant", "batch", "n", "tokens/s", "link", "compute", "idle", "reads", "GiB read",
        "extra MiB",
    ]  # fmt: skip
    return columns, [
        [
            row.name,
            row.batch_size,
            row.n,
            round(row.tokens_per_second, 2),
            round(row.steady.link, 3),
            round(row.steady.compute, 3),
            round(row.steady.both_idle, 3),
            row.reads_per_step.most,
            round(row.bytes_moved / GIB, 2),
            round(row.extra_bytes / MIB),
        ]
        for row in rows
    ]


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


def add_memory(page: HtmlReport, rows: Sequence[LiveRow]) -> None:
    """Adds resident memory, and experts in the arena, over time (Klotski, figure 12)."""
    if not rows:
        return

    def draw(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        for row, hue in zip(rows, ("navy", "teal"), strict=False):
            seconds, sizes, held = zip(*row.memory, strict=True)
            style = {"color": hue_color(hue), "label": row.name}
            above.plot(seconds, [size / MIB for size in sizes], **style)
            below.plot(seconds, held, **style)
        limit = (rows[-1].weights_bytes + rows[-1].arena_bytes) / MIB
        above.axhline(limit, linestyle="--", color=muted_color(), linewidth=1.2)
        above.annotate(
            "weights and budget", (0, limit), (4, 4), textcoords="offset points", fontsize=9,
            color=muted_color(),
        )  # fmt: skip
        above.set(ylabel="resident, MiB", ylim=(0, None))
        below.set(ylabel="experts in memory", xlabel="seconds since the start", ylim=(0, None))
        for axes in (above, below):
            label_lines(axes)

    page.figure(
        "memory-over-time",
        "Memory over time",
        draw,
        ["variant", "seconds", "resident bytes", "experts in the arena"],
        [[row.name, *sample] for row in rows for sample in row.memory],
        inches=(8.0, 5.0),
    )


LANES = {"transfers": "orange", "experts": "blue", "other_layers": "navy", "stalls": "maroon"}
"""Rows of the timeline, with their hues."""


def add_timeline(page: HtmlReport, row: LiveRow) -> None:
    """Adds two layers of one step (Klotski, figure 15)."""
    timeline = row.timeline
    if timeline is None:
        return
    lanes: dict[str, list[tuple[float, float]]] = {lane: getattr(timeline, lane) for lane in LANES}

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, (lane, spans) in enumerate(lanes.items()):
            bars = [(begin, end - begin) for begin, end in spans]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=hue_color(LANES[lane]))
        axes.set_yticks(range(len(LANES)), [lane.replace("_", " ") for lane in LANES])
        axes.set_xlabel("ms since the first of these layers began")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")

    page.figure(
        f"timeline-of-layers-{slug(row.name)}",
        f"Layers {timeline.layers[0]} and {timeline.layers[1]} of one step: {row.name}",
        draw,
        ["lane", "from ms", "to ms"],
        [[lane, *span] for lane, spans in lanes.items() for span in spans],
        inches=(8.0, 2.6),
    )
