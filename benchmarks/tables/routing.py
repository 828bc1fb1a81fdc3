"""The table of replays of a published routing log."""

from benchmarks.reports import read_report
from benchmarks.routing import STARTS, RoutingReport, RoutingRow
from benchmarks.tables.markdown import format_percent, markdown_table
from benchmarks.tables.origins import origin_line


def routing_table() -> list[str]:
    """Returns the mean TPOT of every system by budget, for each start; empty without results."""
    report = read_report("routing", RoutingReport)
    if report is None:
        return []
    lines = [
        f"`{report.log}` ({report.log_origin}): routing of {report.model_id}, {report.top_k} of "
        f"{report.num_experts} experts in {report.num_layers} layers, without hidden states. "
        f"Mean TPOT in ms over n = {report.num_tokens} tokens of {report.num_requests} request(s): "
        f"requests are what intervals are over, so that there are none. Simulated with the bytes "
        f"of {report.shape}.",
        "",
        *origin_line("routing"),
    ]
    for start, hardware in dict.fromkeys((row.start, row.hardware) for row in report.rows):
        rows = [row for row in report.rows if (row.start, row.hardware) == (start, hardware)]
        lines += [f"On {hardware}; {STARTS[start]}:", "", *compare(rows), ""]
    return lines


def compare(rows: list[RoutingRow]) -> list[str]:
    """Returns the systems by their mean at the smallest budget, and the place of `moecast`."""
    budgets = list(dict.fromkeys(row.budget for row in rows))
    times = {(row.system, row.budget): row.tpot_mean_ms for row in rows}
    knowing = {row.system for row in rows if row.knows_future}
    systems = sorted({row.system for row in rows}, key=lambda name: times[name, budgets[0]])
    firsts = {
        budget: min(
            (name for name in systems if name not in knowing), key=lambda n: times[n, budget]
        )
        for budget in budgets
    }
    cells = [
        [
            f"`{name}`" + (" (knows the step's routing)" if name in knowing else ""),
            *(
                f"**{times[name, b]:.2f}**" if name == firsts[b] else f"{times[name, b]:.2f}"
                for b in budgets
            ),
        ]
        for name in systems
    ]
    behind = {b: times["moecast", b] / times[firsts[b], b] - 1 for b in budgets}
    places = [
        f"first at {b}"
        if firsts[b] == "moecast"
        else f"{format_percent(behind[b], 1)} behind `{firsts[b]}` at {b}"
        for b in budgets
    ]
    return [
        *markdown_table(["system", *budgets], cells),
        "",
        f"The fastest in bold; `moecast` is {', '.join(places)}.",
    ]
