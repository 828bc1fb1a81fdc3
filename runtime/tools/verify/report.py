"""Compares a served model with plain Transformers, bit by bit, at several budgets."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from predictors.errors import MoecastError
from runtime.config import (
    REFERENCE_MODEL,
    DecodeKernels,
    DenseFormat,
    Exact,
    ModelConfig,
    SystemConfig,
    VerifyModelConfig,
    VerifyReference,
)
from runtime.generation.loading import choose_system, configure_model
from runtime.hf.grouped import GROUPED_MM
from runtime.hf.row_block import NUM_ROWS
from runtime.presets import DEFAULT_SYSTEM
from runtime.store.model_source import resolve
from runtime.tools.verify.reference import (
    has_integer_weights,
    is_quantised,
    require_memory,
    token_prompts,
)
from runtime.tools.verify.sides import (
    PromptComparison,
    SideReport,
    VerifySide,
    VerifyTask,
    compare_answers,
    run_side,
)

EXPERTS = {
    VerifySide.PLAIN: "all experts in memory",
    VerifySide.LAZY: "experts read one at a time",
    VerifySide.STORED: "the same kernels, experts without cache and transfers",
}


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
    prompts: list[PromptComparison]
    misses: int
    hits: int
    bytes_moved: int


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Comparison of a served model with a reference."""

    model: str
    folder: str
    compared: str
    """The reference and what was compared, in words."""
    reference: SideReport
    rows: list[VerifyRow]
    """One for each budget."""

    @property
    def against(self) -> str:
        """The reference in a few words."""
        implementation = self.reference.experts_implementation
        if implementation in ("eager", GROUPED_MM):
            return f"Transformers {implementation}"
        return "the same kernels, without a cache"

    @property
    def is_equal(self) -> bool:
        """Whether every logit and token was equal, bit by bit."""
        return all(row.equal for row in self.rows)

    @property
    def is_finite(self) -> bool:
        """Whether the reference's logits are numbers."""
        return all(prompt.is_finite for row in self.rows for prompt in row.prompts)

    def require_equal(self) -> None:
        """Raise NotExact if anything differed."""
        if self.is_equal:
            return
        wrong = ", ".join(row.budget for row in self.rows if not row.equal)
        first = next(p for row in self.rows for p in row.prompts if not p.equal)
        raise NotExact(
            f"output differs from {self.against} at budgets {wrong}; first: {asdict(first)}"
        )


def verify(
    model: str | Path | ModelConfig = REFERENCE_MODEL,
    *,
    budget: str | float | Sequence[str | float] = ("15%", "50%", "100%"),
    prompts: Sequence[str] | None = None,
    max_new_tokens: int = 32,
    dtype: str | torch.dtype | None = None,
    local_only: bool | None = None,
    system: str | SystemConfig = DEFAULT_SYSTEM,
    predictor: str | None = None,
    reference: str = "plain",
) -> VerifyReport:
    """Compares a served model with plain Transformers: logits and greedy tokens, bit by bit.

    Reference and served model run in separate processes, one after the other.

    Args:
        model: As for `load`.
        budget: Memory for experts, as for `load`, or several to try.
        prompts: Texts to continue; by default three.
        max_new_tokens: Greedy tokens to compare for each prompt.
        dtype: As for `load`.
        local_only: As for `load`.
        system: Name of a system, or its configuration.
        predictor: Kind, zoo entry or folder of one, in place of the system's.
        reference: `"plain"`: all experts in memory; `"lazy"`: one expert at a time, for models that
            do not fit.

    Returns:
        The comparison, with a row for each budget.

    Raises:
        NotExact: Something differed.
        MoecastError: A wrong argument, a model that cannot be served, or too little memory.

    Example:
        >>> from moecast import verify
        >>> report = verify("qwen2-moe-tiny", budget="50%", max_new_tokens=4)
        >>> report.is_equal
        True
    """
    budgets = [budget] if isinstance(budget, (str, float, int)) else list(budget)
    config = VerifyModelConfig(
        model=configure_model(model, local_only=local_only, dtype=dtype),
        system=choose_system(system),
        predictor=predictor,
        budget=[str(value) for value in budgets],
        max_new_tokens=max_new_tokens,
        reference=VerifyReference(reference),
    )
    if prompts is not None:
        config = replace(config, prompts=list(prompts))
    report = compare_budgets(config, advance=lambda _: None)
    report.require_equal()
    return report


def compare_budgets(config: VerifyModelConfig, *, advance: Callable[[int], None]) -> VerifyReport:
    """Compare every prompt at every budget; `advance` is called after each of `1 + budgets` runs.

    Raises:
        CheckpointError: there is no such model, or memory for the reference is lacking.
    """
    folder = resolve(config.model)
    prompts, description = token_prompts(folder, config.prompts, seed=config.seed)
    side = VerifySide(config.reference.value)
    if is_quantised(folder, config.store) or config.model.dense_format is not DenseFormat.OWN:
        side = VerifySide.STORED
    elif has_integer_weights(folder):
        side = VerifySide.LAZY  # Transformers itself dequantises few of these formats on CPUs.
    if side is not VerifySide.PLAIN and config.model.exact is Exact.GROUPED:
        raise MoecastError(
            f"model.exact=grouped: {config.model.name} cannot be verified with it; "
            + (
                "reference=lazy computes one expert at a time, take reference=plain"
                if side is VerifySide.LAZY
                else "its weights are quantised, and Transformers groups other matrices only"
            )
        )
    if side is VerifySide.PLAIN:
        hint = "use reference=lazy, which reads one expert at a time"
        require_memory(folder, config.model.dtype, otherwise=hint)
    rows: list[VerifyRow] = []
    with tempfile.TemporaryDirectory(prefix="moecast-verify-") as scratch:
        expected = Path(scratch, "reference")
        task = VerifyTask(side=side, config=config, prompts=prompts, output=expected)
        reference = run_side(task)
        advance(1)
        # Each process would choose what is faster; bits are compared under one setting.
        model = replace(
            config.model,
            decode_kernels=DecodeKernels(reference.decode_kernels),
            decode_threads=reference.decode_threads,
            exact=Exact(reference.exact),
        )
        task = replace(task, side=VerifySide.SERVED, config=replace(config, model=model))
        for number, budget in enumerate(config.budget):
            served = Path(scratch, f"served-{number}")
            report = run_side(replace(task, budget=budget, output=served))
            comparisons = [compare_answers(expected, served, i) for i in range(len(prompts))]
            rows.append(make_row(budget, comparisons, report))
            advance(1)
    return VerifyReport(
        model=config.model.name,
        folder=str(folder),
        compared=describe_comparison(reference, side, description),
        reference=reference,
        rows=rows,
    )


def describe_comparison(reference: SideReport, side: VerifySide, prompts: str) -> str:
    """Return the reference and what is compared, in words."""
    experts, implementation = EXPERTS[side], reference.experts_implementation
    if reference.exact == Exact.SHARED:
        implementation = f"{Exact.EAGER.value} (each row alone)"
        experts += f", each new token in a batch of {NUM_ROWS} copies of its sequence"
    return (
        f"reference: Transformers {reference.transformers} {reference.model_class}, "
        f"experts_implementation={implementation}, {experts}, "
        f"weights aligned, {reference.dtype} on {reference.device}, torch "
        f"{reference.torch}, {describe_threads(reference)}, "
        f"decode_kernels={reference.decode_kernels}; {prompts}; logits of every "
        "prompt position and every new token, bit by bit; greedy tokens"
    )


def describe_threads(side: SideReport) -> str:
    """Return a side's threads, and those of its steps of one token, in words."""
    if side.decode_threads in (None, side.threads):
        return f"{side.threads} threads"
    return f"{side.threads} threads ({side.decode_threads} for steps of one token)"


def make_row(budget: str, comparisons: list[PromptComparison], report: SideReport) -> VerifyRow:
    """Summarise the comparisons at one budget and the memory of the serving process."""
    differences = [comparison.max_abs_difference for comparison in comparisons]
    known = [difference for difference in differences if difference is not None]
    assert report.stats is not None
    arena_bytes = report.stats["arena_bytes"]
    overhead = report.peak_memory_bytes - report.weights_bytes - arena_bytes
    return VerifyRow(
        budget=budget,
        equal=all(comparison.equal for comparison in comparisons),
        tokens_compared=sum(comparison.tokens_compared for comparison in comparisons),
        logit_positions_compared=sum(c.logit_positions_compared for c in comparisons),
        max_abs_difference=max(known, default=0.0) if len(known) == len(differences) else None,
        peak_memory_bytes=report.peak_memory_bytes,
        non_expert_bytes=report.weights_bytes,
        arena_bytes=arena_bytes,
        overhead_bytes=overhead if report.device == "cpu" else None,
        prompts=comparisons,
        misses=report.stats["misses"],
        hits=report.stats["hits"],
        bytes_moved=report.stats["bytes_moved"],
    )
