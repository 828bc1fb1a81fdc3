"""Tables of what long traces, training and replays take."""

import statistics

from benchmarks.reports import Document
from benchmarks.tables.markdown import format_size, origin_lines, section


def capacity_tables(report: Document) -> list[str]:
    """Returns the lines between the marks of docs/capacity.md."""
    return [
        *trace_section(report),
        *training_section(report),
        *replay_section(report),
        *origin_lines(report),
    ]


def describe_seconds(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"


def trace_section(report: Document) -> list[str]:
    cost, (short, long) = report.recording, report.recordings[0]
    rows = [
        [
            plan.name,
            f"{plan.num_bytes / 1e12:.2f} TB",
            f"{plan.files:,}",
            "-" if plan.core_hours is None else f"{plan.core_hours:,.0f}",
        ]
        for plan in report.traces
    ]
    files = f"files at {format_size(report.part_bytes)} a part"
    tokens_per_core_second = 1 / statistics.median(cost.core_seconds_per_token)
    text = (
        f"Recording {long.tokens:,} tokens took {cost.bytes_per_token:,.0f} bytes of disk per "
        f"token (planned: {cost.planned_bytes_per_token:,}) and one core for "
        f"1/{tokens_per_core_second:,.0f} s per token, the difference to a recording of "
        f"{short.tokens:,} tokens, so that the start of the program is not in it (median of "
        f"{len(report.recordings)}). A trace of {report.traces[0].tokens:,.0f} tokens:"
    )
    return ["## Traces", "", *section(text, ["trace", "disk", files, "hours of one core"], rows)]


def training_section(report: Document) -> list[str]:
    tokens = report.traces[0].tokens
    rows = [
        [
            cost.what,
            cost.machine,
            f"{cost.token_visits / cost.seconds:,.0f}",
            describe_seconds(tokens * report.epochs * cost.seconds / cost.token_visits),
        ]
        for cost in report.training
    ]
    text = (
        "Measured on the reference model's trace, and the time of "
        f"{report.epochs} epoch over {tokens:,} tokens of that model on the same machine:"
    )
    columns = ["predictors", "machine", "tokens/s", "time"]
    return ["## Training", "", *section(text, columns, rows)]


def replay_section(report: Document) -> list[str]:
    rows = []
    for cost in report.replays:
        step = statistics.median(cost.step_seconds)
        code = "compiled" if cost.is_compiled else "Python"
        # Side by side, one for each core.
        whole = describe_seconds(step * report.replayed_steps / report.replay_cores)
        rows.append([f"`{cost.system}`", cost.budget, code, f"{1e3 * step:.2f} ms", whole])
    first = report.replays[0]
    total = f"{report.replayed_steps:,} steps"
    text = (
        "`moecast evaluate` replays recorded decode steps on simulated machines. Processor time of "
        "one step of the reference model (batch 1, one prefill for "
        f"{first.decode_steps / first.prefills:.0f} steps, prefills included, forecasts recorded "
        f"before; median of {len(first.step_seconds)} replays of {first.decode_steps} steps on "
        f"{report.replay_cores} cores at a time), and the time of {total} on "
        f"{report.replay_cores} cores:"
    )
    columns = ["system", "experts in memory", "code", "a step", total]
    return ["## Replays", "", *section(text, columns, rows)]
