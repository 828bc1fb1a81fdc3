"""Tables of the ablation of the system moecast."""

from typing import Any

from benchmarks.tables.markdown import (
    TPOT_COLUMNS,
    format_figure,
    format_percent,
    format_tpot,
    markdown_table,
    read_document,
)
from benchmarks.tables.origins import origin_line


def ablation_table() -> list[str]:
    """Returns the figures of every variant."""
    report = read_document("moecast")
    if report is None:
        return []
    lines = [
        [
            *(row["hardware"], row["budget"], row["variant"]),
            *format_tpot(row),
            format_figure(row["speed_over_promoe"], 2, "x"),
            format_percent(row["of_bound"]),
            format_percent(row["hit_rate"]),
        ]
        for row in report["rows"]
    ]
    columns = ["machine", "budget", "variant", *TPOT_COLUMNS]
    columns += ["against `promoe`", "of the bound", "hits"]
    return [
        f"Parts of `moecast`, simulated ({describe_steps(report)}; against `promoe` by medians). "
        "`no switch` prefetches all the time; the variants below it lack one part each, or know "
        "the routing of the next tokens:",
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("moecast"),
    ]


def ablation_shares() -> list[str]:
    """Returns each variant's share of the bound by budget."""
    report = read_document("moecast")
    if report is None:
        return []
    rows = report["rows"]
    shares = {(row["hardware"], row["budget"], row["variant"]): row["of_bound"] for row in rows}
    machine = rows[0]["hardware"]
    budgets = dict.fromkeys(budget for hardware, budget, _ in shares if hardware == machine)
    variants = dict.fromkeys(name for hardware, _, name in shares if hardware == machine)
    lines = [
        [name, *(format_percent(shares.get((machine, budget, name))) for budget in budgets)]
        for name in variants
    ]
    return [
        f"Share of the bound that `moecast` reaches on {machine} without each of its parts, and "
        f"with the routing of later tokens known ({describe_steps(report)}):",
        "",
        *markdown_table(["variant", *budgets], lines),
        "",
        *origin_line("moecast"),
    ]


def describe_steps(report: dict[str, Any]) -> str:
    """Returns the number of replayed decode steps and requests."""
    row = report["rows"][0]
    return f"{row['num_steps']} generated held-out tokens of {row['num_requests']} requests"
