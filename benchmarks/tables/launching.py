"""Table of the launchers: equal traces, a second worker, killed workers, and their extras."""

from benchmarks.launchers import LaunchersReport
from benchmarks.reports import read_report
from benchmarks.tables.markdown import format_figure, format_size, markdown_table
from benchmarks.tables.origins import origin_line


def launchers_table() -> list[str]:
    """Returns a row for each launcher, and the costs for the core."""
    report = read_report("launchers", LaunchersReport)
    if (
        report is None
        or report.core is None
        or report.engines is None
        or report.second_worker is None
        or report.killed is None
        or not report.train
    ):
        return []
    killed = report.killed
    title = (
        f"local, 2 workers, {killed.replaced} of them killed (one every "
        f"{killed.every_seconds:.0f} s)"
    )
    rows = [
        [
            name,
            "the same" if run.digest == report.engines.digest else "ANOTHER",
            format_figure(run.start_seconds, 1, " s"),
            format_figure(run.seconds, 1, " s"),
            f"{run.parts}",
            f"{run.retried}",
        ]
        for name, run in {**report.engines.runs, title: killed}.items()
    ]
    same = len({weights.weights_digest for weights in report.train.values()}) == 1
    times = "; ".join(f"{name}: {weights.seconds:.0f} s" for name, weights in report.train.items())
    imported = ", ".join(report.core.imports) or "neither Ray nor submitit"
    return [
        f"`launcher=` recording {report.prompts} prompts with the reference model (routing only, "
        f"one thread in each worker, {report.machine['cores']} cores): digest compared with that "
        "of one process without workers, time until a worker has planned the trace, time from the "
        "plan to the last part, parts, retried parts:",
        "",
        *markdown_table(["launcher", "digest", "start", "recording", "parts", "retried"], rows),
        "",
        f"Two workers record {report.second_worker.speedup:.2f} times as fast as one (medians "
        f"of {report.repetitions}). Weights trained by groups of layers on two workers are "
        f"{'bitwise those' if same else 'NOT those'} of one process ({times}). The core imports "
        f"{imported}; `collect --help` takes {report.core.help_seconds:.2f} s; the extras ray and "
        f"slurm install {format_size(sum(report.core.extra_bytes.values()))} that the core does "
        "without.",
        "",
        *origin_line("launchers"),
    ]
