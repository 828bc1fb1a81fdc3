"""Tables of batch groups: Klotski's figures on this machine and, simulated, on the paper's."""

from collections.abc import Sequence

from benchmarks.klotski.rows import KlotskiReport, Point, live_points, simulated_points
from benchmarks.reports import read_report
from benchmarks.tables.markdown import format_figure, format_percent, markdown_table
from benchmarks.tables.origins import origin_line

NAMES = (
    "single batch, on demand",
    "simple pipeline",
    "+ multi batches",
    "+ only hot experts",
    "+ order (klotski)",
    "caches on disk",
)


def groups_tables(*, every: bool = False) -> list[str]:
    """Returns the live ablation; with `every`, also n against the batch size, and quality."""
    report = read_report("klotski", KlotskiReport)
    if report is None:
        return []
    base = next((r.tokens_per_second for r in report.completed if r.name == NAMES[0]), None)
    lines = [
        [
            row.name,
            str(row.batch_size),
            str(row.n),
            format_figure(row.tokens_per_second, 1),
            format_ratio(row.tokens_per_second, base),
            format_percent(row.steady.link),
            format_percent(row.steady.compute),
            str(row.reads_per_step.most),
        ]
        for row in report.completed
        if row.name in NAMES
    ]
    columns = ["variant", "batch", "n", "tokens/s", "over single", "link", "compute", "reads"]
    text = [
        f"Batches in groups, live, {report.budget} of the experts in memory, prompts of "
        f"{report.prompt_tokens} tokens and {report.new_tokens} new ones (throughput, "
        "prompts included; link and compute busy in the steady state; reads of one expert within "
        f"one step of the group, at most; {report.repetitions} repetitions):",
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("klotski"),
    ]
    if not every:
        return text
    points = live_points(report.completed)
    text += ["Throughput in tokens/s against the batch size and n:", "", *points_table(points), ""]
    for environment, points in simulated_points(report.simulated or []).items():
        text += [f"Simulated, {environment}, tokens/s:", "", *points_table(points), ""]
    if report.quality:
        rows = [
            [
                str(row.window or "all"),
                format_figure(row.nats),
                format_figure(row.perplexity, 1),
                format_percent(row.same_token_share),
            ]
            for row in report.quality
        ]
        columns = ["window", "nats", "perplexity", "same most likely token"]
        text += [
            "Attention to 4 sinks and a window, teacher-forced on held-out text:",
            "",
            *markdown_table(columns, rows),
            "",
        ]
    return text


def format_ratio(speed: float, base: float | None) -> str:
    return format_figure(speed / base if base else None, 2, "x")


def points_table(points: Sequence[Point]) -> list[str]:
    """Returns a line for each batch size, with a column for each n."""
    speeds = {(batch, n): speed for batch, n, speed in points}
    groups = sorted({n for _, n in speeds})
    return markdown_table(
        ["batch", *(f"n = {n}" for n in groups)],
        [
            [str(batch), *(format_figure(speeds.get((batch, n)), 1) for n in groups)]
            for batch in sorted({batch for batch, _ in speeds})
        ],
    )
