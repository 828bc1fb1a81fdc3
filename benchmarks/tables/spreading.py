"""Tables of more devices and machines: simulated."""

from benchmarks.reports import read_report
from benchmarks.scaling import ScalingReport
from benchmarks.tables.markdown import format_figure, format_percent, markdown_table


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
            format_figure(row.latency_ms, 1, " ms"),
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
            format_figure(claim.paper_value, 2),
            format_figure(claim.ours, 2),
        ]
        for claim in report.claims
    ]
    columns = ["model", "devices", f"a token, {report.batch} requests", "hits"]
    columns.append(f"tokens/s, {report.batch_per_node} requests a node")
    return [
        f"`{report.system}` with experts spread over devices and nodes, each device with its "
        "arena and its link (simulated; the reference model's routing, the models' bytes and "
        "layers; `scaling.py` has the machines and the assumed network):",
        "",
        *markdown_table(columns, lines),
        "",
        "MoE-Infinity (sequence level) on its figure 13, and the replays:",
        "",
        *markdown_table(["where", "what", "paper", "ours"], claims),
        "",
        f"Why they differ: {report.claims[0].reason}.",
        "",
    ]
