"""Table of a model of real size, served from small budgets."""

from benchmarks.real_size.run import RealSizeReport
from benchmarks.reports import read_report
from benchmarks.tables.markdown import format_figure, format_percent, markdown_table
from benchmarks.tables.origins import origin_line
from predictors.units import GIB, MIB


def real_size_table() -> list[str]:
    """Returns speed and memory by budget and system."""
    report = read_report("real_size", RealSizeReport)
    if report is None:
        return []
    lines = [
        [
            row.budget,
            f"`{row.system}`",
            format_percent(row.experts_in_memory),
            format_figure(row.load_seconds, 1, " s"),
            format_figure(row.peak_memory_bytes / GIB, 2, " GiB"),
            format_figure(row.overhead_bytes / MIB, 0, " MiB"),
            format_figure(row.ttft_seconds, 2, " s"),
            format_figure(1e3 * row.tpot_mean_seconds, 0, " ms"),
            format_figure(1e3 * row.tpot_median_seconds, 0, " ms"),
            format_figure(1e3 * row.tpot_p95_seconds, 0, " ms"),
            format_figure(row.tokens_per_second, 2),
            format_percent(row.hit_rate),
            format_figure(row.bytes_per_token / MIB, 0, " MiB"),
            format_percent(row.link_share),
            format_figure(1e3 * row.control_seconds_per_layer, 2, " ms"),
        ]
        for row in report.rows
    ]
    columns = ["budget", "system", "in memory", "load", "peak memory", "overhead", "TTFT"]
    columns += ["mean TPOT", "median", "p95", "tokens/s", "hits", "read per token", "link busy"]
    columns += ["control per layer"]
    return [
        f"A model of Qwen3-30B-A3B's sizes with random weights ({report.num_layers} layers of "
        f"{report.num_experts} experts, {report.experts_bytes / GIB:.1f} GiB of int4 experts, "
        f"{report.dense_bytes / GIB:.1f} GiB of other weights in bfloat16), {describe(report)}. "
        f"{report.machine.cores} cores of {report.machine.cpu}, threads for computing: "
        f"{report.machine.threads}; prompts of {report.prompt_tokens} tokens, {report.new_tokens} "
        f"new ones, after a request of {report.warm_up_tokens} that fills the memory; repetitions: "
        f"{report.repetitions}. Overhead: peak memory above the other weights and the budget. "
        "Control: mean TPOT less the time that the computation waits for experts, less the "
        f"{1e3 * report.computing_seconds:.0f} ms of a token whose experts all are in memory and "
        "that no engine serves:",
        "",
        *markdown_table(columns, lines),
        "",
        *origin_line("real_size"),
    ]


def describe(report: RealSizeReport) -> str:
    """Returns where the routing came from."""
    if report.routing is None:
        return f"{report.top_k} experts per token by random routers, which have no locality"
    if report.top_k == report.model_top_k:
        return f"{report.top_k} experts per token as a log of the real model's routing names them"
    return (
        f"{report.top_k} experts per token as a log of the real model's routing names them (the "
        f"model itself takes {report.model_top_k})"
    )
