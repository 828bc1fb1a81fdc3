"""Tables of other programs next to moecast, and the short table of README.md."""

from collections.abc import Mapping, Sequence

from benchmarks.peers.rows import SAME, format_read_ahead
from benchmarks.peers.weights import GGUF_FORMATS
from benchmarks.reports import Document, read_document
from benchmarks.tables.markdown import (
    format_figure,
    format_milliseconds,
    format_size,
    markdown_table,
    origin_line,
    pivot,
    section,
)
from benchmarks.tables.systems import describe_live, read_live

OWN = {
    "bound": "the bound: no system can be faster (simulated)",
    "oracle": "oracle: each step's routing is known beforehand (simulated)",
    "moecast": "**moecast**",
    "promoe": "ProMoE, run by moecast",
    "on-demand": "moecast without forecasts",
}
"""Systems of the short table, in its order."""
OTHERS = {
    "moecast": OWN["moecast"],
    "transformers": "Transformers, weights mapped from the file",
    "accelerate": "Accelerate, disk offload",
    "llama-cpp": "llama.cpp, weights mapped from the file",
    "airllm": "AirLLM, layer by layer",
}
"""Programs of the short table, in its order."""
SHORT_PART = "inflated float32"
"""Part of the other programs' results that the short table shows."""
QUANTISED = {"int4": "Q4_0", "int8": "Q8_0"}
"""Formats of this project of earlier results, and those of llama.cpp that they were compared with.
"""
GGUF = tuple(GGUF_FORMATS)
"""Formats in which all programs read one GGUF file."""


def speed_table() -> list[str]:
    """Returns the time of a token by share of memory, and that of other programs."""
    live, parts, rows = read_document("bench"), read_document("peers"), read_live()
    steps = min(len(row["steps"]) for row in rows if row["steps"] and not row["simulated"])
    names = [*OWN]
    rows = [row for row in rows if row["system"] in OWN]
    rows.sort(key=lambda row: (names.index(row["system"]), float(row["budget"].rstrip("%"))))
    columns, lines = pivot(
        rows,
        lambda row: OWN[row["system"]],
        lambda row: row["budget"],
        lambda row: format_milliseconds(row["tpot_mean_seconds"], 0),
    )
    order = sorted(range(len(columns)), key=lambda place: float(columns[place].rstrip("%")))
    cores = live["machine"]["hardware"]["cores"]
    text = (
        "Mean time per generated token when only this share of the experts fits in memory (2 GiB "
        f"of float32 experts, read from a disk, {cores} CPU cores; {steps} tokens or more for "
        "each figure of moecast):"
    )
    return [
        text,
        "",
        *markdown_table(
            ["", *(columns[place] for place in order)],
            [[label, *(cells[place] for place in order)] for label, *cells in lines],
        ),
        "",
        f"{describe_live()} All of moecast's tokens are those of Transformers.",
        "",
        *origin_line("bench"),
        *others_table(parts[SHORT_PART]),
        *quantised_lines(parts),
        *origin_line("peers", SHORT_PART),
    ]


def fastest_rows(report: Document) -> dict[tuple[str, str], Document]:
    """Returns each peer's fastest row at each budget, whatever the threads and read-ahead."""
    rows = [row for row in report.rows if "cannot_run" not in row]
    rows.sort(key=lambda row: row.tokens_per_second)
    return {(row.peer, row.budget): row for row in rows}


def others_table(report: Document) -> list[str]:
    """Returns the time of a token of other programs, and of moecast in the same run."""
    fastest = fastest_rows(report)
    columns, lines = pivot(
        (row for name in OTHERS for (peer, _), row in fastest.items() if peer == name),
        lambda row: OTHERS[row.peer],
        lambda row: row.budget,
        lambda row: format_milliseconds(1 / row.tokens_per_second, 0),
    )
    settings = {row.read_ahead_kib for row in report.rows if row.read_ahead_kib is not None}
    read_ahead = " or ".join(map(format_read_ahead, sorted(settings, reverse=True)))
    return [
        "Other programs and moecast in one run, with the same weights, prompts and memory; those "
        f"that map their weights depend on the disk's read-ahead, and ran at {read_ahead}"
        f"{', the faster of which is shown' * (len(settings) > 1)} "
        "([how it was measured](docs/results.md#other-programs)):",
        "",
        *markdown_table(["", *columns], lines),
        "",
    ]


def quantised_lines(parts: Mapping[str, Document]) -> list[str]:
    """Returns a sentence for each quantised model: own throughput over llama.cpp's."""
    lines = []
    for report in parts.values():
        if report.format not in (*QUANTISED, *GGUF):
            continue
        best: dict[str, Document] = {}
        for (peer, budget), row in fastest_rows(report).items():
            if peer in OWN and row.over_reference is not None:
                other = best.setdefault(budget, row)
                best[budget] = max(row, other, key=lambda peer_row: peer_row.tokens_per_second)
        ratios = ", ".join(
            f"{format_figure(row.over_reference, 2)} at {budget} (`{row.peer}`)"
            for budget, row in best.items()
        )
        others = (
            f"the fastest other program, the same {report.format} file"
            if report.format in GGUF
            else f"llama.cpp's {QUANTISED[report.format]}"
        )
        lines += [
            f"Throughput in {report.format} over that of {others}, "
            f"`{report.model}`, same memory, the fastest settings of each: {ratios}.",
            "",
        ]
    return lines


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
