"""Tables of batch groups: Klotski's figures on this machine and, simulated, on the paper's."""

from benchmarks.reports import Document
from benchmarks.tables.markdown import format_figure, format_percent, pivot, section

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
    rows = [row for row in report.live if row.name in NAMES and "failed" not in row]
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
    # Groups in Klotski's order, with the KV cache in memory.
    live = [row for row in report.live if row.variant == "klotski" and row.kv_budget is None]
    points = {"Live": [(row.batch_size, row) for row in live if "failed" not in row]}
    for row in report.simulated:
        if row.system == "klotski":
            points.setdefault(f"Simulated, {row.environment}", []).append((row.batch, row))
    lines = []
    for name, found in points.items():
        columns, rows = pivot(
            sorted(found, key=lambda point: point[1].n),
            lambda point: str(point[0]),
            lambda point: f"n = {point[1].n}",
            lambda point: f"{point[1].tokens_per_second:.1f}",
        )
        rows.sort(key=lambda row: int(row[0]))
        lines += section(f"{name}, throughput in tokens/s:", ["batch", *columns], rows)
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
