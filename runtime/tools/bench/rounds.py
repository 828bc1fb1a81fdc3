"""Run every case in turns, A B C A B C, and compare their tokens."""

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from predictors.files import expand_home
from runtime.profiling.bandwidth import drop
from runtime.store.model_check import list_weight_files
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.tasks import BenchRequest, ServedRun, ServeTask, Tokens
from runtime.tools.child_process import ChildFailure, run_in_child
from runtime.tools.comparison import Case

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
    """Run all cases once, then all of them again, `repetitions` times.

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
        for number, outcome in enumerate(outcomes):
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
