"""Tables of systems: simulated, live, validated, next to other programs and to the papers."""

from collections.abc import Mapping
from typing import Any

from benchmarks.papers.run import PapersReport
from benchmarks.peers.rows import PeerRow, PeersReport, format_read_ahead, peers_table
from benchmarks.reports import read_report
from benchmarks.tables.evaluation import beaten_line, read_evaluation, read_live
from benchmarks.tables.markdown import (
    TPOT_COLUMNS,
    format_figure,
    format_percent,
    format_size,
    format_tpot,
    markdown_table,
    read_document,
)
from benchmarks.tables.origins import origin_line
from benchmarks.validate import ValidateReport
from runtime.tools.report.tables import format_or_dash
from train.evaluate.table import KNOWN_NOTE, describe_sample, describe_tally, known_grid

SHORT = ("on-demand", "promoe", "moecast", "oracle")
OWN = {
    "bound": "the bound: no system can be faster (simulated)",
    "oracle": "oracle: each step's routing is known beforehand (simulated)",
    "moecast": "**moecast**",
    "promoe": "ProMoE, run by moecast",
    "on-demand": "moecast without forecasts",
}
OTHERS = {
    "transformers": "Transformers, weights mapped from the file",
    "accelerate": "Accelerate, disk offload",
    "llama-cpp": "llama.cpp, weights mapped from the file",
    "airllm": "AirLLM, layer by layer",
}
"""Rows of the short table, in its order."""
SHORT_PART = "inflated float32"
"""Part of the other programs' results that the short table shows."""
QUANTISED = {"int4": "Q4_0", "int8": "Q8_0"}
"""Formats that llama.cpp has too, under its names."""


def replayed_table(*, batch: int = 1, every: bool = False) -> list[str]:
    """Returns the TPOT of the systems on simulated machines."""
    report = read_evaluation()
    if report is None:
        return []
    rows = [
        row for row in report["rows"] if row["batch"] == batch and (every or row["system"] in SHORT)
    ]
    columns = ["machine", "budget", "system", *TPOT_COLUMNS]
    columns += ["times faster", "of the bound", "hits"]
    lines = [
        [
            *(row["hardware"], row["budget"], f"`{row['system']}`"),
            *format_tpot(row),
            format_figure(row["speedup_decode"], 2, "x"),
            format_percent(row["of_bound"]),
            format_percent(row["hit_rate"]),
        ]
        for row in rows
    ]
    machines = " and ".join(dict.fromkeys(row["hardware"] for row in rows))
    return [
        f"Simulated decode on {machines}, batch {batch}: held-out requests of the reference model "
        f"replayed with the bytes and the compute of {report['shape']['name']} "
        f"({describe_sample(rows)}; intervals over requests; times faster than `on-demand`). "
        "`oracle` knows each step's routing when it begins:",
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("evaluate"),
        *tally_line(report),
    ]


def tally_line(report: Mapping[str, Any]) -> list[str]:
    """Returns in how many cells `moecast` is first."""
    return [
        "Of all cells (machines, budgets, batch sizes), with every system of the five papers in "
        f"each, `moecast` is {describe_tally(report['tally'])}.",
        "",
    ]


def known_table() -> list[str]:
    """Returns the share of the bound against the number of tokens whose routing is known."""
    report = read_evaluation()
    if report is None:
        return []
    columns, lines = known_grid(report)
    return [
        KNOWN_NOTE,
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("evaluate"),
    ]


def live_table(*, every: bool = False) -> list[str]:
    """Returns the TPOT of the systems live."""
    report = read_document("bench")
    if report is None:
        return []
    rows = [row for row in read_live() if every or row["system"] in SHORT]
    if not every:
        rows.sort(key=lambda row: (float(row["budget"].rstrip("%")), SHORT.index(row["system"])))
    lines = [
        [
            row["budget"],
            f"`{row['system']}`" + " (simulated)" * row["simulated"],
            format_milliseconds(row["tpot_mean_seconds"]),
            format_or_dash(
                row["tpot_interval_seconds"],
                lambda ends: f"{1e3 * ends[0]:.1f} to {1e3 * ends[1]:.1f}",
            ),
            format_milliseconds(row["tpot_seconds"]),
            format_milliseconds(row["tpot_p95_seconds"]),
            format_figure(row["tpot_speed_up"], 2, "x"),
            format_percent(row["decode_hit_rate"]),
            "-" if row["simulated"] or not row["steps"] else str(len(row["steps"])),
        ]
        for row in rows
    ]
    columns = ["budget", "system", "mean TPOT", "95 % interval", "median", "p95", "times faster"]
    columns += ["hits", "decode steps"]
    hardware = report["machine"]["hardware"]
    return [
        "Live decode of the reference model inflated to 2 GiB of experts (2.9 MiB each), read from "
        f"the disk past the page cache on {hardware['cores']} cores of "
        f"{hardware['processor']} (times faster than `on-demand`, by medians within a "
        f"repetition): {report['compared']}. Intervals are over the requests of all repetitions. "
        "`oracle` and the bound are simulated; all tokens are those of plain Transformers. "
        f"{first_live()}{beaten_line()}",
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("bench"),
    ]


def first_live() -> str:
    """Returns which of all systems is first live, by the mean, at each budget."""
    rows = [row for row in read_live() if not row["simulated"]]
    firsts = [
        min(
            (row for row in rows if row["budget"] == budget),
            key=lambda row: row["tpot_mean_seconds"],
        )
        for budget in dict.fromkeys(row["budget"] for row in rows)
    ]
    named = [
        f"`{row['system']}` at {row['budget']} ({format_milliseconds(row['tpot_mean_seconds'], 0)})"
        for row in firsts
    ]
    return f"Of all systems, first by the mean is {', '.join(named)}."


def format_milliseconds(seconds: float | None, digits: int = 1) -> str:
    return format_figure(None if seconds is None else 1e3 * seconds, digits, " ms")


def speed_table() -> list[str]:
    """Returns the time of a token by share of memory, and that of other programs."""
    live, parts = read_document("bench"), read_peers()
    if live is None or (peers := parts.get(SHORT_PART)) is None:
        return []
    rows = read_live()
    times = {(row["system"], row["budget"]): row["tpot_mean_seconds"] for row in rows}
    steps = min(len(row["steps"]) for row in rows if row["steps"] and not row["simulated"])
    budgets = sorted({budget for _, budget in times}, key=lambda budget: float(budget.rstrip("%")))
    lines = [
        [label, *(format_milliseconds(times.get((system, budget)), 0) for budget in budgets)]
        for system, label in OWN.items()
        if any((system, budget) in times for budget in budgets)
    ]
    cores = live["machine"]["hardware"]["cores"]
    return [
        "Mean time per generated token when only this share of the experts fits in memory (2 GiB "
        f"of float32 experts, read from a disk, {cores} CPU cores; {steps} tokens or more for "
        "each figure of moecast):",
        "",
        *markdown_table(["", *budgets], lines),
        "",
        f"{first_live()}{beaten_line()} All of moecast's tokens are those of Transformers.",
        "",
        *origin_line("bench"),
        *others_table(peers),
        *quantised_lines(parts),
        *origin_line("peers", SHORT_PART),
    ]


def others_table(peers: PeersReport) -> list[str]:
    """Returns the time of a token of other programs, and of moecast in the same run."""
    fastest = fastest_rows(peers)
    labels = {"moecast": OWN["moecast"], **OTHERS}
    budgets = list(dict.fromkeys(budget for peer, budget in fastest if peer in OTHERS))
    lines = [
        [
            label,
            *(
                format_milliseconds(1 / row.tokens_per_second, 0)
                if (row := fastest.get((peer, budget)))
                else "-"
                for budget in budgets
            ),
        ]
        for peer, label in labels.items()
        if any((peer, budget) in fastest for budget in budgets)
    ]
    settings = {row.read_ahead_kib for row in peers.rows if row.read_ahead_kib is not None}
    read_ahead = " or ".join(map(format_read_ahead, sorted(settings, reverse=True)))
    return [
        "Other programs and moecast in one run, with the same weights, prompts and memory; those "
        f"that map their weights depend on the disk's read-ahead, and ran at {read_ahead}"
        f"{', the faster of which is shown' * (len(settings) > 1)} "
        "([how it was measured](docs/results.md#other-programs)):",
        "",
        *markdown_table(["", *budgets], lines),
        "",
    ]


def read_peers() -> dict[str, PeersReport]:
    """Returns the results of other programs by model and format."""
    return read_report("peers", dict[str, PeersReport]) or {}


def fastest_rows(report: PeersReport) -> dict[tuple[str, str], PeerRow]:
    """Returns each peer's fastest row at each budget, whatever the threads and read-ahead."""
    rows = [row for row in report.rows if isinstance(row, PeerRow)]
    rows.sort(key=lambda row: row.tokens_per_second)
    return {(row.peer, row.budget): row for row in rows}


def quantised_lines(parts: Mapping[str, PeersReport]) -> list[str]:
    """Returns a sentence for each quantised model: own throughput over llama.cpp's."""
    lines = []
    for report in parts.values():
        if report.format not in QUANTISED:
            continue
        best: dict[str, PeerRow] = {}
        for (peer, budget), row in fastest_rows(report).items():
            if peer in OWN and row.over_reference is not None:
                other = best.setdefault(budget, row)
                best[budget] = max(row, other, key=lambda peer_row: peer_row.tokens_per_second)
        ratios = ", ".join(
            f"{format_figure(row.over_reference, 2)} at {budget} (`{row.peer}`)"
            for budget, row in best.items()
        )
        lines += [
            f"Throughput in {report.format} over that of llama.cpp's {QUANTISED[report.format]}, "
            f"`{report.model}`, same memory, the fastest settings of each: {ratios}.",
            "",
        ]
    return lines


def validated_table() -> list[str]:
    """Returns the simulator's figures next to live ones."""
    report = read_report("validate", ValidateReport)
    if report is None:
        return []
    rows = [
        [
            row.budget,
            row.system,
            format_figure(1e3 * row.live.tpot_seconds, 1, " ms"),
            format_figure(1e3 * row.simulated.tpot_seconds, 1, " ms"),
            format_figure(row.tpot_ratio, 2),
            format_percent(row.live.hit_rate, 1),
            format_percent(row.simulated.hit_rate, 1),
        ]
        for row in report.rows
    ]
    columns = ["budget", "system", "TPOT live", "simulated", "ratio", "hits live", "simulated"]
    return [
        "The simulator and live runs of the same steps on the same machine "
        f"({report.prompts} prompts, {report.new_tokens} new tokens each, {report.repetitions} "
        "repetitions; medians):",
        "",
        *markdown_table(columns, rows),
        "",
        f"{report.tpot_within} of {len(rows)} within 10 % of the time (ratios "
        f"{min(row.tpot_ratio for row in report.rows):.2f} to "
        f"{max(row.tpot_ratio for row in report.rows):.2f}), {report.hits_within} within a point "
        "of the hit rate.",
        "",
        *origin_line("validate"),
    ]


def peers_section() -> list[str]:
    """Returns other programs' figures on the same weights, prompts and memory."""
    lines = []
    for part, report in read_peers().items():
        kind = report.format
        if kind in QUANTISED:
            kind += f", {QUANTISED[kind]} in llama.cpp"
        reserved = (
            f", of which {format_size(report.allowance_bytes)} are for the program alone where not "
            "all experts fit"
        )
        has_reserve = any(row.reserved_bytes for row in report.rows)
        lines += [
            f"Other programs with the same weights (`{report.model}`, {kind}; experts of "
            f"{format_size(report.experts_bytes)}), prompts and memory{reserved * has_reserve}, "
            f"interleaved ({len(report.prompts)} prompts, {report.new_tokens} new tokens each, "
            f"after {report.warm_up_tokens} random tokens that fill the memory; "
            f"{report.repetitions} repetitions; times are medians of the repetitions' medians, "
            "tokens/s of the means):",
            "",
            *peers_table(report),
            "",
            *origin_line("peers", part),
        ]
    return lines


def papers_table() -> list[str]:
    """Returns the papers' claims next to the replays, and those that have none."""
    report = read_report("papers", PapersReport)
    if report is None:
        return []
    rows = [
        [
            claim.paper,
            claim.where,
            claim.what,
            format_published(claim.paper_value),
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
    return [
        "Claims of the papers, and replays with their machines and models. Each replay is of "
        f"{report.requests} held-out requests after {report.warm_requests} others, in whose time "
        "the cache fills; intervals are over requests. Where a reason for a difference was tested, "
        "the figure after the change stands next to it. Times are simulated; the routing is that "
        f"of {report.model['model_id']}:",
        "",
        *markdown_table(columns, rows),
        "",
        *origin_line("papers"),
        "Published figures that no replay stands next to:",
        "",
        *markdown_table(["paper", "where", "what", "paper", "why"], others),
        "",
    ]


def format_published(value: float | str | None) -> str:
    """Returns a number with three digits, or words unchanged."""
    return value if isinstance(value, str) else "-" if value is None else f"{value:.3g}"


def format_interval(value: float | str | None, low: float | None, high: float | None) -> str:
    text = format_published(value)
    return text if low is None else f"{text} ({low:.3g} to {high:.3g})"
