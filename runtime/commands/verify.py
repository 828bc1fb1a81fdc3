"""`moecast verify`: compare a served model with plain Transformers bit by bit."""

from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from predictors.table import Table, TableColumn, mebibytes
from runtime.commands.progress import print_line, progress
from runtime.config import VerifyModelConfig
from runtime.tools.report.provenance import describe_origin
from runtime.tools.verify.report import VerifyReport, VerifyRow, compare_budgets


def run(config: VerifyModelConfig) -> dict[str, Any]:
    """Compare every prompt at every budget; fails at the end if anything differed."""
    console = Console()
    with progress(Console(stderr=True), "verifying", total=1 + len(config.budget)) as advance:
        report = compare_budgets(config, advance=advance)
    print_line(report.compared)
    exactness_table(report).print(console)
    memory_table(report.rows, report.model).print(console)
    print_line("overhead: peak less weights and arena, on a CPU; most of it are the libraries")
    if not report.is_finite:
        print_line(
            f"note: logits of {report.against} are NaN or infinite; equal ones mean nothing: look "
            "at the weights, or try model.dtype=float32"
        )
    report.require_equal()
    return {"origin": describe_origin(config.run_dir), **asdict(report)}


def exactness_table(report: VerifyReport) -> Table:
    """Make the table of comparisons at each budget."""
    columns = [
        TableColumn("budget"),
        TableColumn("logits at", "logit_positions_compared", "{} positions".format),
        TableColumn("tokens", "tokens_compared"),
        TableColumn("bitwise equal", "equal", lambda equal: "yes" if equal else "NO", rank=0),
        TableColumn("largest difference", "max_abs_difference", str, rank=1),
        TableColumn("misses", rank=2),
    ]
    title = f"{report.model} against {report.against}"
    return Table(columns=columns, rows=report.rows, title=title)


def memory_table(rows: list[VerifyRow], model: str) -> Table:
    """Make the table of the serving process's memory at each budget."""
    write = partial(mebibytes, digits=0)
    columns = [
        TableColumn("budget"),
        TableColumn("peak", "peak_memory_bytes", write),
        TableColumn("non-expert weights", "non_expert_bytes", write),
        TableColumn("arena", "arena_bytes", write),
        TableColumn("overhead", "overhead_bytes", write, rank=0),
    ]
    title = f"memory of the process that served {model}, MiB"
    return Table(columns=columns, rows=rows, title=title)
