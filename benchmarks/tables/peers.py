"""Tables of other programs next to moecast, and the short table of README.md."""

from collections.abc import Mapping, Sequence

from benchmarks.peers.rows import SAME
from benchmarks.peers.weights import GGUF_FORMATS
from benchmarks.reports import Document, read_document
from benchmarks.tables.markdown import (
    format_milliseconds,
    format_size,
    origin_line,
    pivot,
    section,
)
from benchmarks.tables.systems import read_live

OWN = {
    "moecast": "**moecast**",
    "promoe": "ProMoE, run by moecast",
    "on-demand": "on demand: experts are fetched when a layer needs them",
}
"""Systems of the short table, in its order."""
OTHERS = {
    "transformers": "Transformers with its weights mapped from the file",
    "accelerate": "Accelerate with disk offload",
    "llama-cpp": "llama.cpp with its weights mapped from the file",
    "airllm": "AirLLM",
}
"""Other programs of the short table's page."""
GAIN_BUDGET = "25%"
"""Budget of README's first sentence."""
SHORT_PART = "inflated float32"
"""Part of the other programs' results that stands under the short table."""
QUANTISED = {"int4": "Q4_0", "int8": "Q8_0"}
"""Formats of this project of earlier results, and those of llama.cpp that they were compared with.
"""
GGUF = tuple(GGUF_FORMATS)
"""Formats in which all programs read one GGUF file."""


def gain() -> list[str]:
    """Returns README's first sentence and picture: a token's time with and without forecasts."""
    seconds = {
        row["system"]: row["tpot_mean_seconds"]
        for row in read_live()
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


def speed_table() -> list[str]:
    """Returns the time of a token by share of memory, and that of other programs."""
    live, parts, rows = read_document("bench"), read_document("peers"), read_live()
    rows = [row for row in rows if row["system"] in OWN]
    steps = min(len(row["steps"]) for row in rows)
    names = [*OWN]
    rows.sort(key=lambda row: (names.index(row["system"]), float(row["budget"].rstrip("%"))))
    columns, lines = pivot(
        rows,
        lambda row: OWN[row["system"]],
        lambda row: row["budget"],
        lambda row: format_milliseconds(row["tpot_mean_seconds"], 0),
    )
    cores = live["machine"]["hardware"]["cores"]
    text = (
        "Mean time per token when only this share of the experts fits in memory (the included "
        "model with its experts enlarged to 2 GiB of float32, read from a disk; "
        f"{cores} CPU cores; {steps} tokens or more for each figure):"
    )
    return [
        *section(text, ["", *columns], lines, origin_line("bench")),
        *describe_others(parts[SHORT_PART]),
        *quantised_lines(parts),
        "[Results](docs/results.md#other-programs) has every system, program and setting.",
        "",
        *origin_line("peers", SHORT_PART),
    ]


def fastest_rows(report: Document) -> dict[tuple[str, str], Document]:
    """Returns each peer's fastest row at each budget, whatever the threads and read-ahead."""
    rows = [row for row in report.rows if "cannot_run" not in row]
    rows.sort(key=lambda row: row.tokens_per_second)
    return {(row.peer, row.budget): row for row in rows}


def describe_others(report: Document) -> list[str]:
    """Returns how long the fastest other program takes, and moecast in the same run."""
    rows = sorted(fastest_rows(report).items(), key=lambda item: -item[1].tokens_per_second)
    own = {budget: row for (peer, budget), row in rows if peer == "moecast"}
    fastest: dict[str, Document] = {}
    for (peer, budget), row in rows:
        if peer in OTHERS:
            fastest.setdefault(budget, row)
    return [
        f"Of other programs with the same weights and memory at {budget}, the fastest, "
        f"{OTHERS[row.peer]}, takes {format_milliseconds(1 / row.tokens_per_second, 0)} for a "
        "token, and moecast in the same run "
        f"{format_milliseconds(1 / own[budget].tokens_per_second, 0)}."
        for budget, row in fastest.items()
    ] + [""]


def quantised_lines(parts: Mapping[str, Document]) -> list[str]:
    """Returns for each quantised model who is faster at each budget, and how many times."""
    lines = []
    for report in parts.values():
        if report.format not in (*QUANTISED, *GGUF):
            continue
        other = "llama.cpp" if report.format in QUANTISED else "the fastest other program"
        best: dict[str, float] = {}
        for (peer, budget), row in fastest_rows(report).items():
            if peer in OWN and row.over_reference is not None:
                best[budget] = max(best.get(budget, 0.0), row.over_reference)
        ratios = [
            f"{'where everything fits' if budget == '100%' else f'at {budget}'} "
            + (
                f"moecast is {ratio:.1f} times as fast"
                if ratio >= 1
                else f"{other} is {1 / ratio:.1f} times as fast"
            )
            for budget, ratio in best.items()
        ]
        lines.append(
            f"* `{report.model}` in {report.format}, each program in its fastest setting: "
            f"{', '.join(ratios)}."
        )
    return [*lines, ""]


def peers_section() -> list[str]:
    """Returns other programs' throughput with the same weights, prompts and memory."""
    lines = [
        "Tokens/s (means) of other programs and moecast with the same weights, prompts and memory, "
        "each in its fastest setting of threads and read-ahead, interleaved; in brackets over the "
        "reference's. `benchmarks/results/peers.json` has every setting, times and memory. "
        "Quantised, each program rounds its own way.",
        "",
    ]
    for part, report in read_document("peers").items():
        lines += describe_part(report, origin_line("peers", part))
    return lines


def describe_part(report: Document, origin: Sequence[str] = ()) -> list[str]:
    """Returns the lines of one model in one format."""
    kind = report.format
    if kind in QUANTISED:
        kind += f", {QUANTISED[kind]} in llama.cpp"
    columns, rows = pivot(
        sorted(fastest_rows(report).values(), key=lambda row: float(row.budget.rstrip("%"))),
        lambda row: f"`{row.peer}`",
        lambda row: row.budget,
        lambda row: (
            f"{row.tokens_per_second:.2f}"
            + ("" if row.over_reference is None else f" ({row.over_reference:.2g}x)")
        ),
    )
    text = (
        f"`{report.model}`, {kind}; experts of {format_size(report.experts_bytes)}; "
        f"{len(report.prompts)} prompts, {report.new_tokens} new tokens each; "
        f"{report.repetitions} repetitions; reference: {report.reference_peers[0]}"
        f"{describe_tokens(report)}:"
    )
    lines = section(text, ["program", *columns], rows, origin)
    for row in report.rows:
        if "cannot_run" in row:
            lines += [f"`{row.peer}` did not run at {row.budget}: {row.cannot_run}.", ""]
    return lines


def describe_tokens(report: Document) -> str:
    """Returns whose tokens differ from those of Transformers; empty if they were not compared."""
    same = {row.peer: row.tokens_as_transformers for row in fastest_rows(report).values()}
    if not any(same.values()):
        return ""
    others = [f"{peer} ({where})" for peer, where in same.items() if where not in (None, SAME)]
    return f"; other tokens than Transformers: {', '.join(others) or 'none'}"
