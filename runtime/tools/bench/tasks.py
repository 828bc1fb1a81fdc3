"""Cases, requests and tasks of a live comparison, which are run in turns, and their results.

A B C A B C: what changes on the machine meanwhile falls on all cases alike.
"""

import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from predictors.files import expand_home
from runtime.config import SystemConfig
from runtime.hf.loading import read_config
from runtime.hf.model_faults import check_length
from runtime.hf.tokens import context_length
from runtime.presets import ON_DEMAND, PROMOE, load_system
from runtime.profiling.bandwidth import drop
from runtime.store.model_check import list_weight_files
from runtime.tools.bench.config import BenchConfig
from runtime.tools.child_process import ChildFailure, run_in_child
from runtime.tools.comparison import Case, Condition, Variant
from runtime.tools.verify.reference import token_prompts

ABLATIONS: dict[str, Any] = {
    "promoe without chunks": {"chunked": False},
    "promoe without early preemption": {"early_preemption": False},
    "promoe without reordering": {"reordered": False},
}
"""Techniques of ProMoE, figure 12, each with a switch."""


def list_conditions(config: BenchConfig) -> list[Condition]:
    """Return every budget at every batch size."""
    return [Condition(budget, batch) for batch in config.batch_size for budget in config.budget]


def live_variants(config: BenchConfig) -> list[Variant]:
    """Return the systems of the configuration, the ablations and, in any case, on-demand."""
    live = {system.name: system for system in config.system if not system.knows_future}
    if ON_DEMAND not in live:
        live = {ON_DEMAND: load_system(ON_DEMAND), **live}
    if config.ablation:
        promoe = live.setdefault(PROMOE, load_system(PROMOE))
        live |= {label: replace(promoe, name=label, **off) for label, off in ABLATIONS.items()}
    return [Variant(label=label, system=system) for label, system in live.items()]


def live_cases(config: BenchConfig) -> list[Case]:
    """Return everything that runs live, condition by condition."""
    return [
        Case(variant, condition)
        for condition in list_conditions(config)
        for variant in live_variants(config)
    ]


def find_replayed(systems: Iterable[SystemConfig]) -> list[SystemConfig]:
    """Return the systems that know the future: they can be replayed, not run."""
    return [system for system in systems if system.knows_future]


Tokens = list[list[list[int]]]
"""New token ids by request and row."""


@dataclass(frozen=True)
class BenchRequest:
    """One batch of prompts."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each row of the batch."""
    new_tokens: int
    """Greedy tokens to generate for each row."""
    is_measured: bool


@dataclass(frozen=True, kw_only=True)
class ServeTask:
    """Serve the requests with a case's system from an empty arena and measure."""

    config: BenchConfig
    case: Case
    requests: list[BenchRequest]


@dataclass(frozen=True, kw_only=True)
class RequestsTask:
    """Generate with plain Transformers, or record the routing and replay the bounds."""

    config: BenchConfig
    requests: dict[int, list[BenchRequest]]
    """By batch size."""


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """Measurements of one served run; all but `tokens` are of the measured requests alone."""

    tokens: Tokens
    """Tokens of all requests, the warm-up included."""
    ttft_seconds: list[float]
    tpot_seconds: list[float]
    """Times of all decode steps."""
    wall_seconds: float
    prefill: dict[str, float]
    """Counters and times (`*_seconds`) summed over the prefills."""
    decode: dict[str, float]
    """The same, summed over the decode steps."""
    adaptive_prefetch: dict[str, Any] | None
    predictor: str | None
    reuse_predictor: str | None
    note: str | None
    """Deviation of the run from its system's definition; None: no deviation."""
    arena_bytes: int
    arena_slots: int
    weights_bytes: int
    peak_memory_bytes: int
    page_cache_bytes: int | None = None
    """Bytes of the model's files that the run left in the page cache; None where unknown."""


def make_requests(config: BenchConfig, folder: Path) -> tuple[dict[int, list[BenchRequest]], str]:
    """Make the requests for each batch size; also returns a description of their prompts.

    Raises:
        MoecastError: a prompt has no tokens, or exceeds the model's context with its answer.
    """
    prompts, what = token_prompts(folder, config.prompts, seed=config.seed)
    longest, answer = max(map(len, prompts)), max(config.max_new_tokens, config.warm_up_tokens)
    check_length(longest, answer, context_length(read_config(folder)))
    return {batch: batch_prompts(prompts, batch, config) for batch in config.batch_size}, what


def batch_prompts(
    prompts: Sequence[list[int]], batch: int, config: BenchConfig
) -> list[BenchRequest]:
    """Distribute the prompts in turn, `batch` to each request."""
    turns = itertools.cycle(map(tuple, prompts))
    lengths = [(config.warm_up_tokens, False)] if config.warm_up_tokens else []
    lengths += [(config.max_new_tokens, True)] * config.requests
    return [
        BenchRequest(tuple(itertools.islice(turns, batch)), new_tokens, is_measured)
        for new_tokens, is_measured in lengths
    ]


LIMIT_SECONDS = 900.0
"""A run that takes longer hangs: its row says so, and the others continue."""


@dataclass
class CaseOutcome:
    """Results of the runs of a case, or why there are none."""

    case: Case
    runs: list[ServedRun] = field(default_factory=list)
    failed: str | None = None


def run_rounds(
    config: BenchConfig,
    cases: Sequence[Case],
    requests: dict[int, list[BenchRequest]],
    *,
    folder: Path,
    scratch: Path,
    advance: Callable[[int], None],
) -> list[CaseOutcome]:
    """Run all cases once, then all of them again, `repetitions` times, there and back.

    A machine's speed goes by what ran before: in one order, all runs of a case have the same place.
    A case that fails is not run again. Before each run the pages of the model's files are dropped
    from the page cache.

    Args:
        requests: by batch size.
        scratch: existing folder for the children's files.
        advance: called with 1 for each run that has ended or is skipped.
    """
    outcomes = [CaseOutcome(case) for case in cases]
    files = list_weight_files(folder)
    if config.store.path is not None:
        files += [file for file in expand_home(config.store.path).glob("*") if file.is_file()]
    for repetition in range(config.repetitions):
        for number, outcome in list(enumerate(outcomes))[:: -1 if repetition % 2 else 1]:
            if outcome.failed is None:
                task = ServeTask(
                    config=config,
                    case=outcome.case,
                    requests=requests[outcome.case.condition.batch],
                )
                for file in files:
                    drop(file)
                result = run_in_child(
                    "runtime.tools.bench.serve:run_serve_task",
                    task,
                    scratch / f"{number}-{repetition}",
                    limit_seconds=LIMIT_SECONDS,
                )
                if isinstance(result, ChildFailure):
                    outcome.failed = result.reason
                else:
                    run = ServedRun(**result | {"page_cache_bytes": cached_bytes(files)})
                    outcome.runs.append(run)
            advance(1)
    return outcomes


def find_token_difference(
    outcomes: Sequence[CaseOutcome], expected: dict[int, Tokens]
) -> str | None:
    """Describe where tokens of one batch size first differ; None if nowhere.

    Args:
        expected: reference tokens by batch size; the first case's first run by default.
    """
    known = {batch: ("plain Transformers", tokens) for batch, tokens in expected.items()}
    for outcome in outcomes:
        for repetition, run in enumerate(outcome.runs):
            named = f"{outcome.case}, run {repetition + 1}"
            whose, tokens = known.setdefault(outcome.case.condition.batch, (named, run.tokens))
            if run.tokens != tokens:
                return describe_difference(run.tokens, tokens, named, whose)
    return None


def describe_difference(left: Tokens, right: Tokens, named: str, other: str) -> str:
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        for row, (mine, theirs) in enumerate(zip(a, b, strict=True)):
            for position, (token, expected) in enumerate(zip(mine, theirs, strict=True)):
                if token != expected:
                    return (
                        f"request {number}, row {row}, new token {position}: {named} gave "
                        f"{token}, {other} gave {expected}"
                    )
    raise AssertionError("they are equal")


def cached_bytes(files: Sequence[Path]) -> int | None:
    """Count the files' bytes in the page cache; None on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    return sum(map(_cached_file_bytes, files))


def _cached_file_bytes(file: Path) -> int:
    size = file.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        # Mapping a file without touching it loads no page.
        first = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.addressof(first), size, pages)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file}")
    return mmap.PAGESIZE * sum(byte & 1 for byte in pages.raw)
