"""Tables of systems: on simulated machines, live, validated, next to the papers and peers."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.reports import Document
from benchmarks.routing import STARTS
from benchmarks.tables.markdown import (
    Row,
    format_figure,
    format_interval,
    format_percent,
    format_published,
    markdown_table,
    origin_lines,
    pivot,
    section,
    share,
)
from train.evaluate.table import describe_sample, describe_tally

SHORT = ("on-demand", "promoe", "moecast", "oracle")
"""Systems of the figures that show only some."""


def quote(row: Any) -> str:
    return f"`{row['system']}`"


def bold_least(lines: list[list[str]], skip: Sequence[str]) -> None:
    """Makes the smallest number of each column bold; lines named in `skip` do not compete."""
    for place in range(1, len(lines[0])):
        known = [line for line in lines if line[0] not in skip and line[place] != "-"]
        if known:
            best = min(known, key=lambda line: float(line[place].partition("±")[0]))
            best[place] = f"**{best[place]}**"


def replayed_table(report: Document, batch: int = 1) -> list[str]:
    """Returns the mean TPOT of all systems on simulated machines, a table for each."""
    rows = [row for row in report["rows"] if row["batch"] == batch]
    lines = [
        f"Simulated decode, batch {batch}: held-out requests of the reference model replayed with "
        f"the bytes and the computation of {report['shape']['name']} ({describe_sample(rows)}). "
        "Mean TPOT in ms by memory for experts, and half of the 95 % interval over requests; the "
        "fastest in bold. `oracle` knows each step's routing when it begins:",
        "",
    ]
    for machine in dict.fromkeys(row["hardware"] for row in rows):
        columns, table = pivot(
            (row for row in rows if row["hardware"] == machine),
            quote,
            lambda row: row["budget"],
            lambda row: format_mean(row["tpot_mean_ms"], row["tpot_interval_ms"]),
        )
        bold_least(table, ["`oracle`"])
        lines += [*markdown_table([machine, *columns], table), ""]
    tally = (
        "Of all cells (machines, budgets, batch sizes), with every system of the five papers in "
        f"each, `moecast` is {describe_tally(report['tally'])}."
    )
    return [*lines, *origin_lines(report), tally, ""]


def replayed_batches_table(report: Document) -> list[str]:
    """Returns the same for the largest batches of requests."""
    return replayed_table(report, batch=8)


def ablation_shares(report: Document) -> list[str]:
    """Returns by budget which share of the bound is left without each part of `moecast`."""
    row = report["rows"][0]
    machine = row["hardware"]
    columns, lines = pivot(
        (row for row in report["rows"] if row["hardware"] == machine),
        lambda row: row["variant"],
        lambda row: row["budget"],
        lambda row: format_percent(row["of_bound"]),
    )
    text = (
        f"Share of the bound that `moecast` reaches on {machine} without each of its parts, and "
        f"with the routing of later tokens known ({row['num_steps']} generated held-out tokens of "
        f"{row['num_requests']} requests):"
    )
    return section(text, ["variant", *columns], lines, report)


def routing_table(report: Document) -> list[str]:
    """Returns the mean TPOT of every system on a published routing log, for each start."""
    lines = [
        f"`{report.log}` ({report.log_origin}): routing of {report.model_id}, {report.top_k} of "
        f"{report.num_experts} experts in {report.num_layers} layers, without hidden states. "
        f"Mean TPOT in ms of {report.num_tokens} tokens of {report.num_requests} request(s), "
        f"without intervals. Simulated with the bytes of {report.shape}; the fastest in bold.",
        "",
        *origin_lines(report),
    ]
    for start, hardware in dict.fromkeys((row.start, row.hardware) for row in report.rows):
        rows = [row for row in report.rows if (row.start, row.hardware) == (start, hardware)]
        knowing = [f"`{row.system}`" for row in rows if row.knows_future]
        least = min((row.budget for row in rows), key=share)
        columns, table = pivot(
            sorted(rows, key=lambda row, least=least: (row.budget != least, row.tpot_mean_ms)),  # type: ignore[misc]
            lambda row: f"`{row.system}`",
            lambda row: row.budget,
            lambda row: f"{row.tpot_mean_ms:.2f}",
            share,
        )
        bold_least(table, knowing)
        lines += section(f"On {hardware}; {STARTS[start]}:", ["system", *columns], table)
    return lines


def read_live(report: Document) -> list[Document]:
    """Returns the rows of the live runs of batch 1, without bounds that a run has beaten."""
    rows = [row for row in report.rows if row["batch"] == 1 and not row.get("failed")]
    beaten = find_beaten_bounds(rows)
    return [row for row in rows if not (row["simulated"] and row["budget"] in beaten)]


def find_beaten_bounds(rows: Sequence[Row]) -> list[str]:
    """Returns the budgets at which a run was faster than the bound.

    The bound is simulated with the machine's times as they were measured; it fails where other work
    slowed the machine then, and nothing that was simulated with these times is comparable.
    """
    beaten = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        own = [row for row in rows if row["budget"] == budget]
        bounds = [row["tpot_mean_seconds"] for row in own if row["system"] == "bound"]
        live = [row["tpot_mean_seconds"] for row in own if not row["simulated"]]
        if bounds and live and min(live) < bounds[0]:
            beaten.append(budget)
    return beaten


def describe_bounds(report: Document) -> str:
    """Returns which bounds are left out, and why; empty if none is."""
    beaten = find_beaten_bounds(report["rows"])
    return (
        f" At {', '.join(beaten)} bounds are left out: a run was faster, because their times were "
        "measured while the machine was slower."
        if beaten
        else ""
    )


def live_table(report: Document) -> list[str]:
    """Returns the mean TPOT of all systems live."""
    columns, table = pivot(
        read_live(report),
        lambda row: quote(row) + " (simulated)" * row["simulated"],
        lambda row: row["budget"],
        lambda row: format_mean(row["tpot_mean_seconds"], row["tpot_interval_seconds"], 1e3),
        share,
    )
    bold_least(table, ["`oracle` (simulated)", "`bound` (simulated)"])
    text = (
        "Live decode of the reference model inflated to 2 GiB of experts (2.9 MiB each), read from "
        f"the disk past the page cache: {report['compared']}. Mean TPOT in ms, and half of the "
        "95 % interval over the requests of all repetitions; the fastest in bold. All tokens are "
        f"those of plain Transformers.{describe_bounds(report)}"
    )
    return section(text, ["system", *columns], table, report)


def format_mean(mean: float, interval: Sequence[float] | None, scale: float = 1.0) -> str:
    """Returns a mean and half of its interval, `17.6±0.7`."""
    text = f"{scale * mean:.1f}"
    return text if interval is None else f"{text}±{scale * (interval[1] - interval[0]) / 2:.1f}"


def validated_table(report: Document) -> list[str]:
    """Returns the simulator's TPOT over the live one."""
    columns, lines = pivot(
        report.rows,
        lambda row: f"`{row.system}`",
        lambda row: row.budget,
        lambda row: f"{row.tpot_ratio:.2f}",
    )
    ratios = [row.tpot_ratio for row in report.rows]
    text = (
        "Simulated over live TPOT of the same steps on the same machine "
        f"({report.prompts} prompts, {report.new_tokens} new tokens each, "
        f"{report.repetitions} repetitions; medians). {report.tpot_within} of {len(report.rows)} "
        f"are within 10 % of the time (ratios {min(ratios):.2f} to {max(ratios):.2f}), "
        f"{report.hits_within} within a point of the hit rate:"
    )
    return section(text, ["system", *columns], lines, report)


def prefill_table(report: Document) -> list[str]:
    """Returns each system's time of a prompt next to what it cannot be faster than."""
    rows = [
        [
            f"`{row['system']}`",
            *(f"{row[name]:.2f} s" for name in ("seconds", "compute_seconds", "link_seconds")),
            f"{row['moved_mib']:,.0f} MiB",
            f"{row['over_bound']:.2f}x",
        ]
        for row in report["rows"]
    ]
    text = (
        f"A prompt of {report['prompt_tokens']} tokens with {report['budget']} of the experts in "
        f"memory (2 GiB in {report['dtype']}), next to the computation alone with all of them in "
        "memory, and to the time in which the disk alone reads the missing bytes. Medians of "
        f"{report['prompts']} prompts, measured in turn, ratios within a turn:"
    )
    columns = ["system", "time", "computation", "disk", "missing", "over the larger"]
    return section(text, columns, rows, report)


def control_plane_table(report: Document) -> list[str]:
    """Returns what serving adds to plain Transformers, by model, budget and system."""
    rows = [
        {**row, "model": name_shape(cell), "budget": cell["budget"]}
        for cell in report["cells"]
        for row in cell["rows"]
        if row["over_plain"] != 1
    ]
    columns, lines = pivot(
        rows,
        lambda row: f"{row['model']}, {row['budget']}",
        lambda row: f"`{row['system']}`",
        lambda row: f"{row['over_plain']:.2f}x, {1e6 * row['added_seconds_per_layer']:.0f} µs",
    )
    machine = report["machine"]
    text = (
        f"Random models of layers x experts in float32, on {machine['cores']} cores of "
        f"{machine['cpu']}, threads for computing: {machine['threads']}. TPOT over that of plain "
        "Transformers, and time added per layer; medians of "
        f"{report['repetitions']} turns of {report['steps']} decode steps, within a turn:"
    )
    failed = [
        f"{name_shape(cell)} at {cell['budget']} was not measured: {cell['failed']}."
        for cell in report["cells"]
        if cell["failed"] is not None
    ]
    failed += [
        f"{row['model']} at {row['budget']}: {row['system']} gave other tokens."
        for row in rows
        if not row["same_tokens"]
    ]
    table = section(text, ["model, budget", *columns], lines, report)
    return [*table, *(line for sentence in failed for line in (sentence, ""))]


def name_shape(cell: Row) -> str:
    """Returns a random model's layers and experts, `12x60`."""
    return f"{cell['shape']['num_layers']}x{cell['shape']['num_experts']}"


def papers_table(report: Document) -> list[str]:
    """Returns the papers' claims next to the replays, and those that have none."""
    rows = [
        [
            *(claim.paper, claim.where, claim.what, format_published(claim.paper_value)),
            format_interval(claim.ours, claim.low, claim.high),
            "not known" if claim.change is None else claim.change.what,
            "" if claim.change is None else format_published(claim.change.ours),
            "; ".join(filter(None, (claim.basis, claim.reason))),
        ]
        for claim in report.claims
    ]
    columns = ["paper", "where", "what", "paper", "replayed (95 %)"]
    columns += ["a reason that was tested", "with it", "of"]
    others = [
        [row.paper, row.where, row.what, format_published(row.paper_value), row.reason]
        for row in report.not_replayed
    ]
    text = (
        "Claims of the papers, and replays with their machines and models. Each replay is of "
        f"{report.requests} held-out requests after {report.warm_requests} others, in whose time "
        "the cache fills; intervals are over requests. Where a reason for a difference was tested, "
        "the figure after the change stands next to it. Times are simulated; the routing is that "
        f"of {report.model['model_id']}:"
    )
    return [
        *section(text, columns, rows, report),
        *section(
            "Published figures that no replay stands next to:",
            ["paper", "where", "what", "paper", "why"],
            others,
        ),
    ]


def scaling_tables(report: Document) -> list[str]:
    """Returns devices and nodes, and the paper's claims about figure 13."""

    def place(row: Any) -> tuple[str, str, int, int]:
        return row.shape, row.machine, row.nodes, row.devices

    throughput: Mapping[Any, float] = {
        place(row): row.tokens_per_second
        for row in report.rows
        if row.batch == report.batch_per_node * row.nodes
    }
    lines = [
        [
            row.shape,
            f"{row.nodes} x {row.devices} of {row.machine}",
            f"{format_interval(row.latency_ms, *row.latency_interval_ms)} ms",
            format_percent(row.hit_rate),
            format_figure(throughput.get(place(row)), 0),
        ]
        for row in report.rows
        if row.batch == report.batch
    ]
    columns = ["model", "devices", f"a token, {report.batch} requests", "hits"]
    columns.append(f"tokens/s, {report.batch_per_node} requests a node")
    claims = [
        [
            *(claim.where, claim.what, format_published(claim.paper_value)),
            format_interval(claim.ours, claim.low, claim.high),
        ]
        for claim in report.claims
    ]
    text = (
        f"`{report.system}` with experts spread over devices and nodes, each device with its "
        "arena and its link (simulated; the reference model's routing, the models' bytes and "
        "layers; `scaling.py` has the machines and the assumed network; "
        f"{report.requests} held-out requests; in brackets the 95 % interval over batches):"
    )
    return [
        *section(text, columns, lines, report),
        *section(
            "MoE-Infinity (sequence level) on its figure 13, and the replays:",
            ["where", "what", "paper", "ours"],
            claims,
        ),
        f"Why they differ: {report.claims[0].reason}.",
        "",
    ]
