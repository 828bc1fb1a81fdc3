"""Tables of systems: simulated, live, validated, next to other programs and to the papers."""

from typing import Any

from benchmarks.papers.claims import PapersReport
from benchmarks.peers.rows import PeerRow, PeersReport, peers_table
from benchmarks.reports import read_report
from benchmarks.tables.markdown import format_figure, format_percent, markdown_table, read_document
from benchmarks.validate import ValidateReport

SHORT = ("on-demand", "promoe", "moecast", "oracle")
OWN = {
    "oracle": "the bound: the whole routing is known beforehand (simulated)",
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


def replayed_table(*, batch: int = 1, every: bool = False) -> list[str]:
    """Returns the TPOT of the systems on simulated machines."""
    report = read_document("evaluate")
    if report is None:
        return []
    rows: list[dict[str, Any]] = [row for row in report["rows"] if row["batch"] == batch]
    cells = list(dict.fromkeys((row["hardware"], row["budget"]) for row in rows))
    names = list(dict.fromkeys(row["system"] for row in rows))
    chosen = names if every else [name for name in names if name in SHORT]
    by = {(row["hardware"], row["budget"], row["system"]): row for row in rows}
    winners = {
        (cell["hardware"], cell["budget"]): cell
        for cell in report["winners"]
        if cell["batch"] == batch
    }
    lines = []
    for hardware, budget in cells:
        line = [hardware, budget]
        for name in chosen:
            row = by.get((hardware, budget, name))
            line.append("-" if row is None else format_tpot(row["tpot_ms"], row["speedup_decode"]))
        won = winners[hardware, budget]
        line += [f"`{won['first']}`", format_percent(won["share_of_bound"])]
        lines.append(line)
    tally = report["tally"]
    behind = tally["worst_behind_first"]
    distance = (
        f"its TPOT is at least {-100 * behind:.1f} % below the second's"
        if behind < 0
        else f"at worst {100 * behind:.1f} % behind the first"
    )
    shape, new_tokens = report["shape"]["name"], report["new_tokens"]
    return [
        f"Simulated decode, batch {batch}: held-out requests of the reference model replayed with "
        f"the bytes and the compute of {shape} ({new_tokens} generated tokens; median "
        "TPOT, and times faster than `on-demand`):",
        "",
        *markdown_table(["machine", "budget", *chosen, "first", "`moecast` of the bound"], lines),
        "",
        f"Of {tally['cells']} cells (machines, budgets, batch sizes), with every system of the "
        f"five papers in each, `moecast` is first in {tally['first']}: {distance}.",
        "",
    ]


def format_tpot(milliseconds: float, speed_up: float | None) -> str:
    return f"{milliseconds:.1f} ms" + ("" if speed_up is None else f" ({speed_up:.2f}x)")


def live_table(*, every: bool = False) -> list[str]:
    """Returns the TPOT of the systems live; a run of another day has rows for other budgets."""
    documents = (read_document("bench"), read_document("bench-10-75"))
    reports = [report for report in documents if report is not None]
    rows = [row for report in reports for row in report["rows"] if row["batch"] == 1]
    if not rows:
        return []
    names = list(dict.fromkeys(row["system"] for row in rows))
    chosen = names if every else [name for name in SHORT if name in names]
    by = {(row["budget"], row["system"]): row for row in rows}
    budgets = sorted({row["budget"] for row in rows}, key=lambda budget: float(budget.rstrip("%")))
    lines = []
    for budget in budgets:
        line = [budget]
        for name in chosen:
            row = by.get((budget, name), {"failed": True})
            if row.get("failed"):
                line.append("-")
            else:
                text = format_tpot(1e3 * row["tpot_seconds"], row.get("tpot_speed_up"))
                line.append(f"{text}, hits {format_percent(row.get('decode_hit_rate'))}")
        lines.append(line)
    machine = reports[0]["machine"]["hardware"]
    return [
        "Live decode of the reference model inflated to 2 GiB of experts (2.9 MiB each), read from "
        f"the disk past the page cache on {machine['cores']} cores of {machine['processor']} "
        f"(TPOT, times faster than `on-demand`): {reports[0]['compared']}. The bound is simulated; "
        "all tokens are those of plain Transformers:",
        "",
        *markdown_table(["budget", *chosen], lines),
        "",
    ]


def speed_table() -> list[str]:
    """Returns the time of a token by share of memory: the bound, own systems, other programs."""
    live, peers = read_document("bench"), read_report("peers", PeersReport)
    if live is None or peers is None:
        return []
    times = {
        (row["system"], row["budget"]): row["tpot_seconds"]
        for row in live["rows"]
        if row["batch"] == 1 and not row.get("failed")
    }
    others = {row.peer: row for row in peers.rows if isinstance(row, PeerRow)}
    own = others["moecast"]
    budgets = sorted({budget for _, budget in times}, key=lambda budget: float(budget.rstrip("%")))
    rows = [
        [label, *(_milliseconds(times.get((system, budget))) for budget in budgets)]
        for system, label in OWN.items()
    ]
    rows += [
        [
            label,
            *(
                _milliseconds(row.tpot_seconds if row.budget == budget else None)
                for budget in budgets
            ),
        ]
        for peer, label in OTHERS.items()
        if (row := others.get(peer)) is not None
    ]
    cores = live["machine"]["hardware"]["cores"]
    read_ahead = max(peers.machine.read_ahead_kib.values()) / 1024
    return [
        "Time per generated token when only this share of the experts fits in memory (2 GiB of "
        f"float32 experts, read from a disk, {cores} CPU cores):",
        "",
        *markdown_table(["", *budgets], rows),
        "",
        f"The other programs ran at {own.budget}, next to moecast, which took "
        f"{_milliseconds(own.tpot_seconds)} in that run: "
        f"{own.decode_over_accelerate:.1f} times the throughput of Accelerate. All of moecast's "
        "tokens are those of Transformers. The machine's disk reads ahead "
        f"{read_ahead:.0f} MiB, which slows programs that map their weights. "
        "[How it was measured](docs/results.md)",
        "",
    ]


def _milliseconds(seconds: float | None) -> str:
    return format_figure(None if seconds is None else 1e3 * seconds, 0, " ms")


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
        "The simulator and live runs of the same steps on the same machine:",
        "",
        *markdown_table(columns, rows),
        "",
        f"{report.tpot_within} of {len(rows)} within 10 % of the time, {report.hits_within} "
        "within a point of the hit rate.",
        "",
    ]


def peers_section() -> list[str]:
    """Returns other programs' figures on the same weights, prompts and memory."""
    report = read_report("peers", PeersReport)
    if report is None:
        return []
    return [
        "Other programs with the same weights (float32), prompts and memory, interleaved:",
        "",
        *peers_table(report),
        "",
    ]


def papers_table() -> list[str]:
    """Returns the papers' claims next to the replays."""
    report = read_report("papers", PapersReport)
    if report is None:
        return []
    rows = [
        [
            claim.paper,
            claim.where,
            claim.what,
            format_figure(claim.paper_value, 2),
            format_figure(claim.ours, 2),
            claim.reason,
        ]
        for claim in report.claims
    ]
    columns = ["paper", "where", "what", "paper", "ours", "why they differ"]
    return [
        "Claims of the papers, and replays with their machines and models:",
        "",
        *markdown_table(columns, rows),
        "",
    ]
