"""Tables of the formats that experts can be served in."""

from benchmarks.dequantise import DequantiseReport
from benchmarks.formats import FormatsReport
from benchmarks.lockstep import LockstepReport
from benchmarks.quantised import QuantisedReport
from benchmarks.reports import read_report
from benchmarks.tables.markdown import format_figure, format_percent, format_size, markdown_table
from benchmarks.tables.origins import origin_line
from runtime.config import DenseFormat


def formats_table() -> list[str]:
    """Returns speed by format, in the same memory."""
    report = read_report("formats", FormatsReport)
    if report is None:
        return []
    lines = [
        [
            f"`{row.format}`"
            + ("" if row.dense is DenseFormat.OWN else f", dense layers in `{row.dense.value}`"),
            f"`{row.system}`",
            format_size(row.experts_bytes),
            format_percent(row.share),
            format_figure(1e3 * row.tpot_mean_seconds, 1, " ms"),
            format_figure(1e3 * row.tpot_p95_seconds, 1, " ms"),
            format_figure(row.decode_tokens_per_second, 1),
            format_figure(row.over_float32, 1, "x"),
            format_percent(row.hit_rate),
        ]
        for row in report.rows
    ]
    columns = ["format", "system", "all experts", "in memory", "mean TPOT", "p95", "tokens/s"]
    columns += ["of float32's", "hits"]
    return [
        "Live decode of the reference model inflated to 2 GiB of float32 experts, with "
        f"{format_size(report.budget_bytes)} for experts in every format, read from the disk past "
        f"the page cache on {report.machine.cores} cores of {report.machine.cpu}, threads for "
        f"computing: {report.machine.threads} ({report.repetitions} repetitions of "
        f"{report.requests} requests of {report.new_tokens} tokens, in turns, after "
        f"{report.warm_up_tokens} tokens that fill the memory; ratios within a repetition):",
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("formats"),
    ]


def quality_table() -> list[str]:
    """Returns the loss by format."""
    report = read_report("quantised", QuantisedReport)
    if report is None:
        return []
    lines = [
        [
            row.experts,
            format_percent(row.bytes_ratio),
            format_figure(row.nats, 4),
            format_figure(row.nats_more, 4),
            format_percent(row.most_likely_token_same, 1),
            format_figure(row.greedy_tokens_before_first_difference, 1),
            "-" if row.accuracy is None else format_percent(row.accuracy),
        ]
        for row in report.rows
    ]
    columns = ["format", "experts' bytes", "nats", "more than bfloat16"]
    columns += [
        "most likely token the same",
        f"equal greedy tokens of {report.new_tokens}",
        "right continuations",
    ]
    return [
        f"Quality of the reference model on {report.tokens:,} tokens of held-out text, served in "
        f"each format; right continuations: lm-evaluation-harness through the server, "
        f"{report.documents} documents with {report.choices} choices each; bytes include "
        "the padding of these small experts to whole blocks of the disk:",
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("quantised"),
    ]


def dequantise_table() -> list[str]:
    """Returns the time of dequantising an expert, next to that of Transformers' operations."""
    report = read_report("dequantise", DequantiseReport)
    if report is None:
        return []
    rows = [
        [
            row.format,
            *(
                format_figure(1e3 * seconds, 1, " ms")
                for seconds in (row.ours_seconds, row.library_seconds)
            ),
            format_figure(row.speed, 1, "x"),
            format_figure(1e3 * row.product_seconds, 1, " ms"),
        ]
        for row in report.rows
    ]
    return [
        f"Dequantising one expert to bfloat16, bit for bit alike, {report.machine.threads} thread "
        f"(medians of {report.repetitions} rounds, in turns), and the products of one token:",
        "",
        *markdown_table(["format", "moecast", "Transformers", "speed", "products"], rows),
        "",
        *origin_line("dequantise"),
        "",
    ]


def lockstep_table() -> list[str]:
    """Returns the throughput of several sequences over that of one, by `model.exact`."""
    report = read_report("lockstep", LockstepReport)
    if report is None:
        return []
    rows = [
        [
            f"`{row.exact}`",
            str(row.clients),
            format_figure(row.tokens_per_second, 0),
            format_figure(row.over_one, 2, "x"),
            format_figure(row.over_reference, 2, "x"),
        ]
        for row in report.rows
    ]
    columns = ["`model.exact`", "sequences", "tokens/s", "over one", "over one `eager`"]
    return [
        f"Sequences that are generated together: {report.model} in {report.dtype}, {report.budget} "
        f"of the experts in memory, {report.machine.threads} thread, decode steps (medians of "
        f"{report.repetitions} rounds, ratios within a round):",
        "",
        *markdown_table(columns, rows),
        "",
        *origin_line("lockstep"),
        "",
    ]
