"""`moecast verify`: compare a served model with plain Transformers bit by bit."""

from dataclasses import asdict
from typing import Any

from rich.console import Console

from predictors.table import Table
from predictors.units import MIB
from runtime.commands.progress import print_line, progress
from runtime.config import VerifyModelConfig
from runtime.tools.verify.report import VerifyReport, VerifyRow, compare_budgets


def run(config: VerifyModelConfig) -> dict[str, Any]:
    """Compare every prompt at every budget; fails at the end if anything differed."""
    console = Console()
    with progress(Console(stderr=True), "verifying", total=1 + len(config.budget)) as advance:
        report = compare_budgets(config, advance=advance)
    print_line(console, report.compared)
    exactness_table(report).print(console)
    memory_table(report.rows, report.model).print(console)
    print_line(console, "overhead: peak less weights and arena; most of it are the libraries")
    report.require_equal()
    return asdict(report)


def exactness_table(report: VerifyReport) -> Table:
    """Make the table of comparisons at each budget."""
    columns = ("budget", "logits at", "tokens", "bitwise equal", "largest difference", "misses")
    cells = [
        [
            row.budget,
            f"{row.logit_positions_compared} positions",
            str(row.tokens_compared),
            "yes" if row.equal else "NO",
            str(row.max_abs_difference),
            str(row.misses),
        ]
        for row in report.rows
    ]
    title = f"{report.model} against {report.against}"
    return Table.of(columns, cells, title=title, importance=columns[3:])


def memory_table(rows: list[VerifyRow], model: str) -> Table:
    """Make the table of the serving process's memory at each budget."""
    cells = [
        [
            row.budget,
            *(
                f"{size / MIB:.0f}"
                for size in (row.peak_memory_bytes, row.non_expert_bytes, row.arena_bytes)
            ),
            "on a device" if row.overhead_bytes is None else f"{row.overhead_bytes / MIB:.0f}",
        ]
        for row in rows
    ]
    columns = ("budget", "peak", "non-expert weights", "arena", "overhead")
    title = f"memory of the process that served {model}, MiB"
    return Table.of(columns, cells, title=title, importance=columns[4:])
