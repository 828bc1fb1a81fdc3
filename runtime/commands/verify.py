"""`python -m runtime verify`: is what we serve exactly the model, and in how much memory?"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from predictors.errors import MoecastError
from predictors.units import MIB
from runtime.commands.progress import progress
from runtime.config import VerifyConfig
from runtime.engine.machine import available_memory_bytes
from runtime.store.model_source import resolve
from runtime.tools.verify.answers import compare
from runtime.tools.verify.prompts import token_prompts
from runtime.tools.verify.reference import plain_bytes
from runtime.tools.verify.request import Request, Side
from runtime.tools.verify.sides import run_side

BOUND_BYTES = 300 * MIB
"""Of memory beside the weights that are not experts and the budget."""


class NotExact(RuntimeError):
    """Ours, not the user's: a budgeted model differed from the plain one."""


def run(config: VerifyConfig) -> dict[str, Any]:
    """Compares every prompt at every budget; fails at the end if anything differed."""
    console = Console()
    folder = resolve(config.model)
    prompts, described = token_prompts(folder, config.prompts, seed=config.seed)
    side = Side(config.reference.value)
    if side is Side.PLAIN:
        require_memory(folder, config)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="moecast-verify-") as scratch,
        progress(console, "verifying", total=1 + len(config.budgets)) as advance,
    ):
        expected = Path(scratch, "reference")
        asked = Request(side=side, config=config, budget="", prompts=prompts, output=expected)
        reference = run_side(asked)
        advance(1)
        for number, budget in enumerate(config.budgets):
            found = Path(scratch, f"served-{number}")
            report = run_side(replace(asked, side=Side.SERVED, budget=budget, output=found))
            pairs = [compare(expected, found, i) for i in range(len(prompts))]
            rows.append({"budget": budget, **summed(pairs), **memory(report), "prompts": pairs})
            rows[-1] |= {key: report["stats"][key] for key in ("misses", "hits", "bytes_moved")}
            advance(1)
    what = (
        f"reference: Transformers {reference['transformers']} {reference['class']}, "
        f"experts_implementation={reference['experts_implementation']}, "
        f"{'all experts in memory' if side is Side.PLAIN else 'experts read one at a time'}, "
        f"weights aligned, {reference['dtype']} on {reference['device']}, torch "
        f"{reference['torch']}, {reference['threads']} threads; {described}; logits of every "
        "prompt position and every new token, bit by bit; greedy tokens"
    )
    console.print(what, highlight=False, soft_wrap=True)
    console.print(exactness_table(rows, config.model.name))
    console.print(memory_table(rows, config.model.name))
    results = {
        "model": config.model.name,
        "folder": str(folder),
        "compared": what,
        "reference": reference,
        "rows": rows,
    }
    wrong = [row["budget"] for row in rows if not row["equal"]]
    if wrong:
        first = next(p for row in rows for p in row["prompts"] if not p["equal"])
        raise NotExact(
            f"output differs from Transformers eager at budgets {', '.join(wrong)}; first: {first}"
        )
    return results


def require_memory(folder: Path, config: VerifyConfig) -> None:
    """Refuses a reference that would not fit.

    Raises:
        MoecastError: with what is needed, what there is, and the way that needs less.
    """
    needed, available = plain_bytes(folder, config.model.dtype), available_memory_bytes()
    if needed > available:
        raise MoecastError(
            f"plain Transformers needs {needed} bytes for all experts of {folder}, {available} are "
            "available; add reference=lazy, which reads one expert at a time"
        )


def summed(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """The prompts' comparisons as one."""
    differences = [pair["max_abs_difference"] for pair in pairs]
    return {
        "equal": all(pair["equal"] for pair in pairs),
        "tokens_compared": sum(pair["tokens_compared"] for pair in pairs),
        "logit_positions_compared": sum(pair["logit_positions_compared"] for pair in pairs),
        "max_abs_difference": None if None in differences else max(differences, default=0.0),
    }


def memory(report: dict[str, Any]) -> dict[str, Any]:
    """Peak of the serving process beside what it is told it may use; on a device, not compared."""
    peak, weights = report["peak_memory_bytes"], report["weights_bytes"]
    arenas = report["stats"]["arena_bytes"]
    on_host = report["device"] == "cpu"
    overhead = peak - weights - arenas if on_host else None
    return {
        "peak_memory_bytes": peak,
        "non_expert_bytes": weights,
        "arena_bytes": arenas,
        "overhead_bytes": overhead,
        "overhead_bound_bytes": BOUND_BYTES,
        "overhead_within_bound": None if overhead is None else overhead < BOUND_BYTES,
    }


def exactness_table(rows: list[dict[str, Any]], model: str) -> Table:
    """What was compared at each budget."""
    table = Table(title=f"{model} against Transformers eager")
    columns = ("budget", "logits at", "tokens", "bitwise equal", "largest difference", "misses")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["budget"],
            f"{row['logit_positions_compared']} positions",
            str(row["tokens_compared"]),
            "yes" if row["equal"] else "NO",
            str(row["max_abs_difference"]),
            str(row["misses"]),
        )
    return table


def memory_table(rows: list[dict[str, Any]], model: str) -> Table:
    """Where the serving process's memory went at each budget."""
    table = Table(title=f"memory of the process that served {model}, MiB")
    for column in ("budget", "peak", "not experts", "experts", "beside these", "bound"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = ("peak_memory_bytes", "non_expert_bytes", "arena_bytes")
        overhead = row["overhead_bytes"]
        table.add_row(
            row["budget"],
            *(f"{row[size] / MIB:.0f}" for size in sizes),
            "on a device" if overhead is None else f"{overhead / MIB:.0f}",
            {True: "within 300", False: "OVER 300", None: "not compared"}[
                row["overhead_within_bound"]
            ],
        )
    return table
