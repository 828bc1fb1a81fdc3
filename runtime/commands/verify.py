"""`moecast verify`: compare a served model with plain Transformers bit by bit."""

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from predictors.text_table import TextTable
from predictors.units import MIB
from runtime.commands.progress import print_line, progress
from runtime.config import VerifyModelConfig
from runtime.store.model_source import resolve
from runtime.tools.verify.answers import PromptComparison, compare_answers
from runtime.tools.verify.imports import ALLOWANCE_BYTES, measure_import_bytes
from runtime.tools.verify.reference import require_memory, token_prompts
from runtime.tools.verify.sides import SideReport, VerifySide, VerifyTask, run_side


class NotExact(RuntimeError):
    """An internal error: the served model differed from the reference."""


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """Comparison and memory at one budget; sizes in bytes."""

    budget: str
    equal: bool
    tokens_compared: int
    logit_positions_compared: int
    max_abs_difference: float | None
    """None if a difference is NaN or infinite."""
    peak_memory_bytes: int
    non_expert_bytes: int
    arena_bytes: int
    overhead_bytes: int | None
    """Peak memory less weights and arena; None on a GPU, where host memory is not compared."""
    overhead_bound_bytes: int
    """Peak memory of a process that only imports PyTorch and Transformers, and an allowance."""
    overhead_within_bound: bool | None
    prompts: list[PromptComparison]
    misses: int
    hits: int
    bytes_moved: int


def run(config: VerifyModelConfig) -> dict[str, Any]:
    """Compare every prompt at every budget; fails at the end if anything differed."""
    console = Console()
    folder = resolve(config.model)
    prompts, description = token_prompts(folder, config.prompts, seed=config.seed)
    side = VerifySide(config.reference.value)
    if side is VerifySide.PLAIN:
        hint = "use reference=lazy, which reads one expert at a time"
        require_memory(folder, config.model.dtype, otherwise=hint)
    rows: list[VerifyRow] = []
    with (
        tempfile.TemporaryDirectory(prefix="moecast-verify-") as scratch,
        progress(Console(stderr=True), "verifying", total=1 + len(config.budget)) as advance,
    ):
        expected = Path(scratch, "reference")
        task = VerifyTask(side=side, config=config, prompts=prompts, output=expected)
        reference = run_side(task)
        import_bytes = measure_import_bytes(reference.model_module)
        advance(1)
        for number, budget in enumerate(config.budget):
            served = Path(scratch, f"served-{number}")
            report = run_side(replace(task, side=VerifySide.SERVED, budget=budget, output=served))
            comparisons = [compare_answers(expected, served, i) for i in range(len(prompts))]
            rows.append(make_row(budget, comparisons, report, import_bytes=import_bytes))
            advance(1)
    experts = "all experts in memory" if side is VerifySide.PLAIN else "experts read one at a time"
    what = (
        f"reference: Transformers {reference.transformers} {reference.model_class}, "
        f"experts_implementation={reference.experts_implementation}, {experts}, "
        f"weights aligned, {reference.dtype} on {reference.device}, torch "
        f"{reference.torch}, {reference.threads} threads; {description}; logits of every "
        "prompt position and every new token, bit by bit; greedy tokens"
    )
    print_line(console, what)
    exactness_table(rows, config.model.name).print(console)
    memory_table(rows, config.model.name).print(console)
    print_line(
        console,
        f"overhead: peak less weights and arena; its limit: the {import_bytes / MIB:.0f} MiB of a "
        f"process that only imports PyTorch and Transformers, and {ALLOWANCE_BYTES / MIB:.0f} MiB",
    )
    results = {
        "model": config.model.name,
        "folder": str(folder),
        "compared": what,
        "reference": asdict(reference),
        "import_bytes": import_bytes,
        "rows": [asdict(row) for row in rows],
    }
    wrong = [row.budget for row in rows if not row.equal]
    if wrong:
        first = next(p for row in rows for p in row.prompts if not p.equal)
        raise NotExact(
            f"output differs from Transformers eager at budgets {', '.join(wrong)}; first: "
            f"{asdict(first)}"
        )
    return results


def make_row(
    budget: str, comparisons: list[PromptComparison], report: SideReport, *, import_bytes: int
) -> VerifyRow:
    """Summarise the comparisons at one budget and the memory of the serving process."""
    differences = [comparison.max_abs_difference for comparison in comparisons]
    known = [difference for difference in differences if difference is not None]
    assert report.stats is not None
    arena_bytes = report.stats["arena_bytes"]
    overhead = report.peak_memory_bytes - report.weights_bytes - arena_bytes
    on_host = report.device == "cpu"
    bound_bytes = import_bytes + ALLOWANCE_BYTES
    return VerifyRow(
        budget=budget,
        equal=all(comparison.equal for comparison in comparisons),
        tokens_compared=sum(comparison.tokens_compared for comparison in comparisons),
        logit_positions_compared=sum(c.logit_positions_compared for c in comparisons),
        max_abs_difference=max(known, default=0.0) if len(known) == len(differences) else None,
        peak_memory_bytes=report.peak_memory_bytes,
        non_expert_bytes=report.weights_bytes,
        arena_bytes=arena_bytes,
        overhead_bytes=overhead if on_host else None,
        overhead_bound_bytes=bound_bytes,
        overhead_within_bound=overhead < bound_bytes if on_host else None,
        prompts=comparisons,
        misses=report.stats["misses"],
        hits=report.stats["hits"],
        bytes_moved=report.stats["bytes_moved"],
    )


def exactness_table(rows: list[VerifyRow], model: str) -> TextTable:
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
        for row in rows
    ]
    title = f"{model} against Transformers eager"
    return TextTable(title=title, columns=columns, rows=cells, importance=columns[3:])


def memory_table(rows: list[VerifyRow], model: str) -> TextTable:
    """Make the table of the serving process's memory at each budget."""
    verdicts = {True: "within", False: "OVER", None: "not compared with"}
    cells = [
        [
            row.budget,
            *(
                f"{size / MIB:.0f}"
                for size in (row.peak_memory_bytes, row.non_expert_bytes, row.arena_bytes)
            ),
            "on a device" if row.overhead_bytes is None else f"{row.overhead_bytes / MIB:.0f}",
            f"{verdicts[row.overhead_within_bound]} {row.overhead_bound_bytes / MIB:.0f}",
        ]
        for row in rows
    ]
    columns = ("budget", "peak", "non-expert weights", "arena", "overhead", "limit")
    title = f"memory of the process that served {model}, MiB"
    return TextTable(title=title, columns=columns, rows=cells, importance=columns[4:])
