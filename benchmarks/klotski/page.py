"""The report as a page: Klotski's figures 12, 14 and 15 and its table 3, from this machine."""

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
from runtime.tools.report.html_report import HtmlReport, slug

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABLATION = ("simple pipeline", "+ multi batches", "+ only hot experts", "+ order (klotski)")


def build_page(report: KlotskiReport) -> HtmlReport:
    """Builds the tables, and a figure for each of the paper's."""
    rows = report.completed
    page = HtmlReport("Batches in groups", f"klotski on {report.model}, {report.budget} budget")
    page.table("Variants", *variants_table(rows), note=NOTE)
    by_name = {row.name: row for row in rows}
    add_groups(page, "figure-14", "Throughput against n", live_points(rows))
    add_bars(page, [by_name[name] for name in ABLATION if name in by_name])
    compared = [by_name[name] for name in (ABLATION[0], ABLATION[-1]) if name in by_name]
    add_memory(page, compared)
    for row in compared:
        add_timeline(page, row)
    for environment, points in simulated_points(report.simulated or []).items():
        name = f"simulated-{slug(environment)}"
        add_groups(page, name, f"Simulated: {environment}", points)
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
    """Adds figure 14: a line for each batch size."""
    if not points:
        return

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for batch in dict.fromkeys(batch for batch, _, _ in points):
            line = [(n, speed) for size, n, speed in points if size == batch]
            axes.plot(*zip(*line, strict=True), marker="o", label=f"batch {batch}")
        axes.set_xlabel("n, batches of a group")
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0)
        axes.legend()

    page.figure(name, heading, draw, ["batch", "n", "tokens/s"], [list(point) for point in points])


def add_bars(page: HtmlReport, rows: Sequence[LiveRow]) -> None:
    """Adds table 3."""
    if not rows:
        return
    names = [row.name for row in rows]
    speeds = [row.tokens_per_second for row in rows]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.bar(names, speeds)
        axes.set_ylabel("tokens/s")

    page.figure(
        "table-3",
        "What each step adds",
        draw,
        ["step", "tokens/s"],
        [list(pair) for pair in zip(names, speeds, strict=True)],
    )


def add_memory(page: HtmlReport, rows: Sequence[LiveRow]) -> None:
    """Adds figure 12: resident memory, and experts in the arena, over time."""
    if not rows:
        return

    def draw(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        for row in rows:
            seconds = [at for at, _, _ in row.memory]
            above.plot(seconds, [size / MIB for _, size, _ in row.memory], label=row.name)
            below.plot(seconds, [held for _, _, held in row.memory], label=row.name)
        for row in rows[-1:]:
            limit = (row.weights_bytes + row.arena_bytes) / MIB
            above.axhline(limit, linestyle="--", color="C7", label="weights and budget")
        above.set_ylabel("resident, MiB")
        above.set_ylim(bottom=0)
        above.legend()
        below.set_ylabel("experts in the arena")
        below.set_xlabel("seconds")

    page.figure(
        "figure-12",
        "Memory over time",
        draw,
        ["arm", "seconds", "resident bytes", "experts in the arena"],
        [[row.name, *sample] for row in rows for sample in row.memory],
        inches=(8.0, 5.0),
    )


LANES = {
    "transfers": "C0",
    "experts": "C2",
    "other_layers": "C3",
    "stalls": "C7",
}


def add_timeline(page: HtmlReport, row: LiveRow) -> None:
    """Adds figure 15: two layers of one step."""
    timeline = row.timeline
    if timeline is None:
        return
    lanes: dict[str, list[tuple[float, float]]] = {lane: getattr(timeline, lane) for lane in LANES}

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, (lane, spans) in enumerate(lanes.items()):
            bars = [(begin, end - begin) for begin, end in spans]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=LANES[lane])
        axes.set_yticks(range(len(LANES)), [lane.replace("_", " ") for lane in LANES])
        axes.set_xlabel("ms")

    page.figure(
        f"figure-15-{slug(row.name)}",
        f"Layers {timeline.layers[0]} and {timeline.layers[1]} of one step: {row.name}",
        draw,
        ["lane", "from ms", "to ms"],
        [[lane, *span] for lane, spans in lanes.items() for span in spans],
    )
