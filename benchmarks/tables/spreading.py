"""Tables of more devices and machines: simulated."""

from benchmarks.papers.claims import Interval
from benchmarks.reports import read_report
from benchmarks.scaling import ScalingReport
from benchmarks.tables.comparing import format_interval, format_published
from benchmarks.tables.markdown import format_figure, format_percent, markdown_table
from benchmarks.tables.origins import origin_line


def scaling_tables() -> list[str]:
    """Returns devices and nodes, and the paper's claims about figure 13."""
    report = read_report("scaling", ScalingReport)
    if report is None:
        return []
    throughput = {
        (row.shape, row.machine, row.nodes, row.devices): row.tokens_per_second
        for row in report.rows
        if row.batch == report.batch_per_node * row.nodes
    }
    lines = [
        [
            row.shape,
            f"{row.nodes} x {row.devices} of {row.machine}",
            f"{row.latency_ms:.1f} ms{format_bounds(row.latency_interval_ms)}",
            format_percent(row.hit_rate),
            format_figure(throughput.get((row.shape, row.machine, row.nodes, row.devices)), 0),
        ]
        for row in report.rows
        if row.batch == report.batch
    ]
    claims = [
        [
            claim.where,
            claim.what,
            format_published(claim.paper_value),
            format_interval(claim.ours, claim.low, claim.high),
        ]
        for claim in report.claims
    ]
    columns = ["model", "devices", f"a token, {report.batch} requests", "hits"]
    columns.append(f"tokens/s, {report.batch_per_node} requests a node")
    return [
        f"`{report.system}` with experts spread over devices and nodes, each device with its "
        "arena and its link (simulated; the reference model's routing, the models' bytes and "
        "layers; `scaling.py` has the machines and the assumed network; "
        f"{report.requests} held-out requests; in brackets the 95 % interval over batches):",
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("scaling"),
        "MoE-Infinity (sequence level) on its figure 13, and the replays:",
        "",
        *markdown_table(["where", "what", "paper", "ours"], claims),
        "",
        f"Why they differ: {report.claims[0].reason}.",
        "",
    ]


def format_bounds(interval: Interval) -> str:
    low, high = interval
    return "" if low is None else f" ({low:.1f} to {high:.1f})"
