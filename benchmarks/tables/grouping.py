"""Tables of batch groups: Klotski's figures on this machine and, simulated, on the paper's."""

from collections.abc import Sequence

from benchmarks.klotski.rows import Point, list_completed, live_points, simulated_points
from benchmarks.reports import Document
from benchmarks.tables.markdown import (
    format_figure,
    format_percent,
    pivot,
    section,
)

NAMES = (
    "single batch, on demand",
    "simple pipeline",
    "+ multi batches",
    "+ only hot experts",
    "+ order (klotski)",
    "caches on disk",
)


def groups_table(report: Document) -> list[str]:
    """Returns the live ablation."""
    rows = [row for row in list_completed(report) if row.name in NAMES]
    base = next(row.tokens_per_second for row in rows if row.name == NAMES[0])
    lines = [
        [
            *(row.name, str(row.batch_size), str(row.n)),
            format_figure(row.tokens_per_second, 1),
            format_figure(row.tokens_per_second / base, 2, "x"),
            format_percent(row.steady.link),
            format_percent(row.steady.compute),
            str(row.reads_per_step.most),
        ]
        for row in rows
    ]
    columns = ["variant", "batch", "n", "tokens/s", "over single", "link", "compute", "reads"]
    text = (
        f"Batches in groups, live, {report.budget} of the experts in memory, prompts of "
        f"{report.prompt_tokens} tokens and {report.new_tokens} new ones (throughput, prompts "
        "included; link and compute busy in the steady state; reads of one expert within one step "
        f"of the group, at most; {report.repetitions} repetitions):"
    )
    return section(text, columns, lines, report)


def group_sizes_tables(report: Document) -> list[str]:
    """Returns throughput against the batch size and n, live and simulated, and quality."""
    environments = {
        "Live": live_points(list_completed(report)),
        **{
            f"Simulated, {name}": points
            for name, points in simulated_points(report.simulated).items()
        },
    }
    lines = []
    for name, points in environments.items():
        columns, rows = make_grid(points)
        lines += section(f"{name}, throughput in tokens/s:", columns, rows)
    quality = [
        [
            str(row.window or "all"),
            format_figure(row.nats),
            format_figure(row.perplexity, 1),
            format_percent(row.same_token_share),
        ]
        for row in report.quality
    ]
    text = "Attention to 4 sinks and a window, teacher-forced on held-out text:"
    columns = ["window", "nats", "perplexity", "same most likely token"]
    return [*lines, *section(text, columns, quality, report)]


def make_grid(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Returns a line for each batch size, with a column for each n."""
    columns, rows = pivot(
        sorted(points, key=lambda point: point[1]),
        lambda point: str(point[0]),
        lambda point: f"n = {point[1]}",
        lambda point: f"{point[2]:.1f}",
    )
    return ["batch", *columns], sorted(rows, key=lambda row: int(row[0]))
