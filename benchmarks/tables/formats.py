"""Tables of the formats that experts can be served in, and of a model of real size."""

from benchmarks.reports import Document
from benchmarks.tables.markdown import (
    format_figure,
    format_milliseconds,
    format_percent,
    format_size,
    pivot,
    section,
)
from predictors.units import GIB, MIB
from runtime.config import DenseFormat


def formats_table(report: Document) -> list[str]:
    """Returns speed by format, in the same memory."""
    columns, lines = pivot(
        report.rows,
        describe_format,
        lambda row: f"`{row.system}`",
        lambda row: (
            f"{1e3 * row.tpot_mean_seconds:.1f} ms ({row.over_float32:.1f}x), "
            f"{format_percent(row.hit_rate)}"
        ),
    )
    text = (
        "Live decode of the reference model inflated to 2 GiB of float32 experts, with "
        f"{format_size(report.budget_bytes)} for experts in every format, read from the disk past "
        f"the page cache ({report.repetitions} repetitions of {report.requests} requests of "
        f"{report.new_tokens} tokens, in turns). Mean TPOT, throughput over float32's within a "
        "repetition, hit rate:"
    )
    return section(text, ["format", *columns], lines, report)


def describe_format(row: Document) -> str:
    dense = row.get("dense", DenseFormat.OWN)  # earlier results are without it
    in_dense = "" if dense == DenseFormat.OWN else f", dense layers in `{dense}`"
    return f"`{row.format}`{in_dense}, {format_percent(row.share)} in memory"


def payoff_table(report: Document) -> list[str]:
    """Returns what forecasting costs or gains, by format and budget."""

    def describe(row: Document) -> str:
        low, high = row.ratio_interval
        return f"{row.ratio:.2f} ({low:.2f}-{high:.2f})"

    columns, lines = pivot(
        report.rows, lambda row: f"`{row.format}`", lambda row: row.budget, describe
    )
    text = (
        "Mean TPOT of `moecast` over that of `on-demand`: the reference model, memory empty at "
        f"first, {report.repetitions} x {report.requests} requests of {report.new_tokens} tokens "
        "in turns (95 % interval):"
    )
    return section(text, ["format", *columns], lines, report)


def quality_table(report: Document) -> list[str]:
    """Returns the loss by format."""
    lines = [
        [
            row.experts,
            format_percent(row.bytes_ratio),
            format_figure(row.nats, 4),
            format_figure(row.nats_more, 4),
            format_percent(row.most_likely_token_same, 1),
            "-" if row.accuracy is None else format_percent(row.accuracy),
        ]
        for row in report.rows
    ]
    columns = ["format", "experts' bytes", "nats", "more than bfloat16"]
    columns += ["most likely token the same", "right continuations"]
    text = (
        f"Loss of the reference model on {report.tokens:,} tokens of held-out text, served in "
        f"each format; right continuations: lm-evaluation-harness through the server, "
        f"{report.documents} documents with {report.choices} choices each; bytes include "
        "the padding of these small experts to whole blocks of the disk:"
    )
    return section(text, columns, lines, report)


def dequantise_table(report: Document) -> list[str]:
    """Returns the time of dequantising an expert, next to that of Transformers' operations."""
    rows = [
        [
            row.format,
            format_milliseconds(row.ours_seconds),
            format_milliseconds(row.library_seconds),
            format_figure(row.speed, 1, "x"),
            format_milliseconds(row.product_seconds),
        ]
        for row in report.rows
    ]
    text = (
        f"Dequantising one expert to bfloat16, bit for bit alike, {report.machine.threads} thread "
        f"(medians of {report.repetitions} rounds, in turns), and the products of one token:"
    )
    columns = ["format", "moecast", "Transformers", "speed", "products"]
    return section(text, columns, rows, report)


def lockstep_table(report: Document) -> list[str]:
    """Returns the throughput of several sequences over that of one, by `model.exact`."""
    columns, lines = pivot(
        report.rows,
        lambda row: f"`{row.exact}`",
        lambda row: str(row.clients),
        lambda row: f"{row.tokens_per_second:.0f} ({row.over_reference:.2f}x)",
    )
    text = (
        f"Tokens/s of sequences that are generated together, and over one `eager`: {report.model} "
        f"in {report.dtype}, {report.budget} of the experts in memory, {report.machine.threads} "
        f"thread, decode steps (medians of {report.repetitions} rounds, ratios within a round):"
    )
    columns = ["`model.exact`", *columns]
    return section(text, columns, lines, report)


def real_size_table(report: Document) -> list[str]:
    """Returns speed and memory of a model of real size by budget and system."""
    columns, lines = pivot(
        report.rows,
        lambda row: f"{row.budget} ({format_percent(row.experts_in_memory)})",
        lambda row: f"`{row.system}`",
        lambda row: (
            f"{format_milliseconds(row.tpot_mean_seconds, 0)}, {format_percent(row.hit_rate)}, "
            f"{row.bytes_per_token / MIB:.0f} MiB, {row.ttft_seconds:.2f} s"
        ),
    )
    text = (
        f"A model of Qwen3-30B-A3B's sizes with random weights ({report.num_layers} layers of "
        f"{report.num_experts} experts, {report.experts_bytes / GIB:.1f} GiB of int4 experts, "
        f"{report.dense_bytes / GIB:.1f} GiB of other weights, in int8), {report.top_k} of the "
        f"model's {report.model_top_k} experts per token chosen by a log of the real model's "
        f"routing. {report.machine.cores} cores of {report.machine.cpu}, threads for computing: "
        f"{report.machine.threads}; prompts of {report.prompt_tokens} tokens, {report.new_tokens} "
        f"new ones; repetitions: {report.repetitions}. Mean TPOT, hits, bytes read per "
        "token, TTFT; `benchmarks/results/real_size.json` has the memory:"
    )
    return section(text, ["budget", *columns], lines, report)
