"""Tables of other programs next to moecast, and the short tables of README.md."""

from benchmarks.peers.rows import SAME
from benchmarks.peers.weights import GGUF_FORMATS
from benchmarks.reports import Document
from benchmarks.tables.markdown import (
    format_milliseconds,
    format_size,
    origin_lines,
    pivot,
    section,
    share,
)
from benchmarks.tables.systems import read_live

OWN = {
    "moecast": "**moecast**",
    "promoe": "ProMoE, run by moecast",
    "on-demand": "on demand: experts are fetched when a layer needs them",
}
"""Systems of the short table, in its order."""
PROGRAMS = {
    "on-demand": "moecast (`on-demand`)",
    "llama-cpp": "llama.cpp",
    "llama-cpp-in-memory": "llama.cpp",
    "ik-llama-cpp": "ik_llama.cpp",
    "ik-llama-cpp-in-memory": "ik_llama.cpp",
    "fastllm-in-memory": "fastllm",
}
"""Names of programs where they differ from those of the peers."""
GAIN_BUDGET = "25%"
"""Budget of README's first sentence."""
NOTABLE = 1.05
"""Ratios of speeds that are less are not told apart."""
MODELS = {
    "inflated": "the included model enlarged to 2 GiB of float32",
    "qwen3-4-layers": "four layers of Qwen3-30B-A3B's sizes, random weights, a real log's routing",
}
"""Descriptions of the models that programs are compared with."""


def gain(report: Document) -> list[str]:
    """Returns README's first sentence and picture: a token's time with and without forecasts."""
    seconds = {
        row["system"]: row["tpot_mean_seconds"]
        for row in read_live(report)
        if row["budget"] == GAIN_BUDGET and not row["simulated"]
    }
    own, others = seconds["moecast"], seconds["on-demand"]
    return [
        f"**With {GAIN_BUDGET} of its experts in memory, a Mixture-of-Experts model writes "
        f"{others / own:.1f} times as fast with moecast as when experts are fetched on demand: a "
        f"token takes {format_milliseconds(own, 0)}, not {format_milliseconds(others, 0)}.**",
        "",
        "![Time per token of moecast, of ProMoE and on demand, by the share of the experts that "
        "fits in memory](docs/images/tpot-against-budget.svg)",
    ]


def speed_table(report: Document) -> list[str]:
    """Returns the time of a token by share of memory."""
    rows = [row for name in OWN for row in read_live(report) if row["system"] == name]
    columns, lines = pivot(
        rows,
        lambda row: OWN[row["system"]],
        lambda row: row["budget"],
        lambda row: format_milliseconds(row["tpot_mean_seconds"], 0),
        share,
    )
    text = (
        "Mean time per token when only this share of the experts fits in memory (the included "
        "model with its experts enlarged to 2 GiB, read from a disk; "
        f"{report.machine.hardware.cores} CPU cores; {min(len(row['steps']) for row in rows)} "
        "tokens or more for each figure):"
    )
    return section(text, ["", *columns], lines, report)


def fastest_rows(report: Document) -> dict[tuple[str, str], Document]:
    """Returns each peer's fastest row at each budget, whatever the threads and read-ahead."""
    rows = [row for row in report.rows if "cannot_run" not in row]
    rows.sort(key=lambda row: row.tokens_per_second)
    return {(row.peer, row.budget): row for row in rows}


def compare_rows(report: Document) -> list[tuple[Document, Document]]:
    """Returns the fastest rows of moecast and of any other program, at each budget of both.

    Where moecast did not run, the row is that of `on-demand`.
    """
    fastest = fastest_rows(report)
    own = "moecast" if any(peer == "moecast" for peer, _ in fastest) else "on-demand"
    rows = sorted(fastest.values(), key=lambda row: row.tokens_per_second)
    others = {row.budget: row for row in rows if row.peer not in OWN}
    return [
        (fastest[own, budget], others[budget])
        for budget in dict.fromkeys(row.budget for row in report.rows)
        if budget in others and (own, budget) in fastest
    ]


def describe_others(parts: Document) -> list[str]:
    """Returns who is faster with one file for all, moecast or the fastest other program."""
    quantised = [part for part in parts.values() if part.format in GGUF_FORMATS]
    return [
        "Other programs and moecast with the same GGUF file and the same memory, each in its "
        "fastest setting:",
        "",
        *map(describe_quantised, quantised),
        "",
        "[Results](docs/results.md#other-programs) has every system, program and setting.",
        "",
        *origin_lines(*quantised),
    ]


def describe_quantised(report: Document) -> str:
    """Returns who is faster at each budget with the same GGUF file, and how many times."""
    ratios = []
    for rows in compare_rows(report):
        slower, faster = sorted(rows, key=lambda row: row.tokens_per_second)
        place = "where everything fits" if slower.budget == "100%" else f"at {slower.budget}"
        ratio = faster.tokens_per_second / slower.tokens_per_second
        first, second = (PROGRAMS.get(row.peer, row.peer) for row in (faster, slower))
        ratios.append(
            f"{place} {first} and {second} are equally fast"
            if ratio < NOTABLE
            else f"{place} {first} is {ratio:.1f} times as fast as {second}"
        )
    model = MODELS.get(report.model, report.model)
    return f"* {report.format}, {model}{describe_context(report)}: {'; '.join(ratios)}."


def peers_section(parts: Document) -> list[str]:
    """Returns other programs' throughput with the same weights, prompts and memory."""
    first = next(iter(parts.values()))
    lines = [
        "Tokens/s (means) of other programs and moecast with the same weights, prompts and memory, "
        "each in its fastest setting of threads and read-ahead, interleaved; in brackets over the "
        "fastest other program's, in float32 Accelerate's. "
        f"{len(first.prompts)} prompts, {first.new_tokens} new tokens each.",
        "",
    ]
    for report in parts.values():
        lines += describe_part(report)
    return lines


def describe_part(report: Document) -> list[str]:
    """Returns the lines of one model in one format."""
    columns, rows = pivot(
        fastest_rows(report).values(),
        lambda row: f"`{row.peer}`",
        lambda row: row.budget,
        lambda row: (
            f"{row.tokens_per_second:.2f}"
            + ("" if row.over_reference is None else f" ({row.over_reference:.2g}x)")
            + (f", the first after {row.ttft_seconds:.1f} s" if report.get("context") else "")
        ),
        share,
    )
    text = (
        f"`{report.model}`, {report.format}{describe_context(report)}; "
        f"experts of {format_size(report.experts_bytes)}; "
        f"{report.repetitions} repetitions{describe_tokens(report)}:"
    )
    lines = section(text, ["program", *columns], rows, report)
    for row in report.rows:
        if "cannot_run" in row:
            lines += [f"`{row.peer}` did not run at {row.budget}: {row.cannot_run}.", ""]
    return lines


def describe_context(report: Document) -> str:
    tokens = report.get("context", 0)
    return f", after {tokens:,} tokens of context" if tokens else ""


def describe_tokens(report: Document) -> str:
    """Returns whose tokens differ from those of Transformers; empty if they were not compared."""
    same = {row.peer: row.tokens_as_transformers for row in fastest_rows(report).values()}
    if not any(same.values()):
        return ""
    others = [f"{peer} ({where})" for peer, where in same.items() if where not in (None, SAME)]
    return f"; other tokens than Transformers: {', '.join(others) or 'none'}"
