"""Tables of memory, network, disk and hours of larger installations."""

import statistics

from benchmarks.capacity.memory import PROCESS_BYTES, MachinePlan
from benchmarks.capacity.replays import ReplayCost
from benchmarks.capacity.run import CapacityReport, Installation, PulledWhat
from benchmarks.reports import read_report
from benchmarks.tables.markdown import format_percent, format_size, markdown_table
from benchmarks.tables.origins import origin_line
from predictors.units import GIB


def capacity_tables() -> list[str]:
    """Returns the sections between the marks of docs/capacity.md."""
    report = read_report("capacity", CapacityReport)
    if report is None:
        return []
    return [
        *memory_section(report),
        *egress_section(report),
        *trace_section(report),
        *training_section(report),
        *replay_section(report),
        *origin_line("capacity"),
    ]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def memory_section(report: CapacityReport) -> list[str]:
    models = {model.shape: model for row in report.one_user for model in row.plan.models}
    several = {model.shape: model for row in report.all_users for model in row.plan.models}
    return [
        "## Memory",
        "",
        f"A user has {report.context_tokens:,} tokens of prompt and answer. Experts are counted "
        "whole; with a budget, a share of them is in memory:",
        "",
        *markdown_table(
            ["model, bf16", "dense weights", "all experts", "KV cache of a token", "of one user",
             f"of {report.users} users"],
            [
                [
                    f"`{name}`",
                    gib(model.dense_bytes),
                    gib(model.experts_bytes),
                    format_size(model.kv_bytes_per_token),
                    gib(model.kv_bytes),
                    gib(several[name].kv_bytes),
                ]
                for name, model in models.items()
            ],
        ),
        "",
        "Several servers on one machine, each with its dense weights, its KV caches and "
        f"{gib(PROCESS_BYTES)} for the process; the rest is for experts, divided by the size of "
        "all experts:",
        "",
        *markdown_table(
            ["machine", "memory", "models", "experts that fit, one user each",
             f"{report.users} users each"],
            [
                machine_line(one, many)
                for one, many in zip(report.one_user, report.all_users, strict=True)
            ],
        ),
        "",
    ]  # fmt: skip


def machine_line(one: Installation, many: Installation) -> list[str]:
    return [
        one.name,
        f"{one.plan.memory_bytes / GIB:.0f} GiB",
        ", ".join(f"`{model.shape}`" for model in one.plan.models),
        describe_share(one.plan),
        describe_share(many.plan),
    ]


def describe_share(plan: MachinePlan) -> str:
    if plan.left_bytes < 0:
        return f"none: {gib(-plan.left_bytes)} missing"
    return f"{format_percent(plan.expert_share)} ({gib(plan.left_bytes)})"


def egress_section(report: CapacityReport) -> list[str]:
    return [
        "## Egress of a zoo",
        "",
        "Measured on the loopback with `moecast zoo pull` and an empty cache, and once more when "
        "nothing had changed; bytes of bodies:",
        "",
        *markdown_table(
            ["pull", "requests", "bytes", "index", "again"],
            [
                [
                    name_pull(pull),
                    f"{pull.cost.requests}",
                    f"{pull.cost.num_bytes:,}",
                    f"{pull.cost.index_bytes:,}",
                    f"{pull.cost.again_requests} request, {pull.cost.again_bytes:,} bytes",
                ]
                for pull in report.pulls
            ],
        ),
        "",
        f"{report.machines:,} machines pull once; the origin sends at "
        f"{report.uplink_bytes_per_second / 1e6:.0f} MB/s. A CDN of {report.edges} caches asks for "
        "each blob once per cache and passes every request for the index on; a mirror at each of "
        f"{report.sites} sites pulls once:",
        "",
        *markdown_table(
            ["pull", "layout", "requests at the origin", "sent by the origin", "time of the link"],
            [
                [
                    name_pull(pull),
                    egress.layout,
                    f"{egress.origin_requests:,}",
                    f"{egress.origin_bytes / 1e9:.2f} GB",
                    describe_seconds(egress.seconds),
                ]
                for pull in report.pulls
                for egress in pull.egress
            ],
        ),
        "",
    ]


def name_pull(pull: PulledWhat) -> str:
    name = f"`{pull.cost.what}`"
    return name if "/" in pull.cost.what else f"{name} `system=moecast`"


def describe_seconds(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"


def trace_section(report: CapacityReport) -> list[str]:
    cost, (short, long) = report.recording, report.recordings[0]
    return [
        "## Traces",
        "",
        f"Recording {long.tokens:,} tokens took {cost.bytes_per_token:,.0f} bytes of disk per "
        f"token (planned: {cost.planned_bytes_per_token:,}) and one core for "
        f"1/{cost.tokens_per_core_second:,.0f} s per token, the difference to a recording of "
        f"{short.tokens:,} tokens, so that the start of the program is not in it (median of "
        f"{len(report.recordings)}). A trace of {report.traces[0].tokens:,.0f} tokens:",
        "",
        *markdown_table(
            ["trace", "disk", f"files at {format_size(report.part_bytes)} a part",
             "hours of one core", "cores for one day"],
            [
                [
                    plan.name,
                    f"{plan.num_bytes / 1e12:.2f} TB",
                    f"{plan.files:,}",
                    "-" if plan.core_hours is None else f"{plan.core_hours:,.0f}",
                    "-" if plan.workers_for_a_day is None else f"{plan.workers_for_a_day}",
                ]
                for plan in report.traces
            ],
        ),
        "",
    ]  # fmt: skip


def training_section(report: CapacityReport) -> list[str]:
    tokens = report.traces[0].tokens
    return [
        "## Training",
        "",
        "Measured on the reference model's trace ([results](results.md)), and the time of "
        f"{report.epochs} epoch over {tokens:,} tokens of that model on the same machine:",
        "",
        *markdown_table(
            ["predictors", "machine", "tokens/s", "time"],
            [
                [
                    cost.what,
                    cost.machine,
                    f"{cost.tokens_per_second:,.0f}",
                    describe_seconds(3600 * cost.hours(tokens, epochs=report.epochs)),
                ]
                for cost in report.training
            ],
        ),
        "",
    ]


def replay_section(report: CapacityReport) -> list[str]:
    """Returns a table with a column for compiled code and one for Python files."""
    rows: dict[tuple[str, str], dict[bool, ReplayCost]] = {}
    for cost in report.replays:
        rows.setdefault((cost.system, cost.budget), {})[cost.is_compiled] = cost
    first = report.replays[0]

    def total(cost: ReplayCost | None) -> str:
        if cost is None:
            return "-"
        seconds = cost.wall_seconds(report.replayed_steps, cores=report.replay_cores)
        return describe_seconds(seconds)

    def step(cost: ReplayCost | None) -> str:
        return "-" if cost is None else f"{1e3 * statistics.median(cost.step_seconds):.2f} ms"

    return [
        "## Replays",
        "",
        "`moecast evaluate` replays recorded decode steps on simulated machines. Processor time of "
        "one step of the reference model (batch 1, one prefill for "
        f"{first.decode_steps / first.prefills:.0f} steps, prefills included, forecasts recorded "
        f"before; median of {len(first.step_seconds)} replays of {first.decode_steps} steps on "
        f"{report.replay_cores} cores at a time), and the time of {report.replayed_steps:,} steps "
        f"on {report.replay_cores} cores:",
        "",
        *markdown_table(
            ["system", "experts in memory", "a step", f"{report.replayed_steps:,} steps",
             "a step, uncompiled", f"{report.replayed_steps:,} steps"],
            [
                [f"`{system}`", budget, step(costs.get(True)), total(costs.get(True)),
                 step(costs.get(False)), total(costs.get(False))]
                for (system, budget), costs in rows.items()
            ],
        ),
        "",
    ]  # fmt: skip
