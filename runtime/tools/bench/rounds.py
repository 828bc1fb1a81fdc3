"""Run every case in turns, A B C A B C, and compare their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.process import answer
from runtime.tools.bench.requests import Request
from runtime.tools.bench.residue import forget, remembered_bytes
from runtime.tools.bench.tasks import Failure, Served
from runtime.tools.comparison import Case
from runtime.tools.doctor.files import weights_files

Run = dict[str, Any]
Tokens = list[list[list[int]]]
"""Of each request, of each row."""


@dataclass
class Outcome:
    """Results of the runs of a case, or why there are none."""

    case: Case
    runs: list[Run] = field(default_factory=list)
    failed: str | None = None


def run_rounds(
    config: BenchConfig,
    cases: Sequence[Case],
    requests: dict[int, list[Request]],
    *,
    folder: Path,
    scratch: Path,
    advance: Callable[[int], None],
) -> list[Outcome]:
    """Run all cases once, then all of them again, `repetitions` times.

    A case that fails is not tried again. Before each run the system is asked to forget what it has
    of the model's files.

    Args:
        folder: the model's.
        scratch: an existing one, for the children's files.
        advance: told of every run that is over or will not come.
    """
    outcomes = [Outcome(case) for case in cases]
    files = weights_files(folder)
    if config.store.path is not None:
        files += [file for file in config.store.path.iterdir() if file.is_file()]
    for repetition in range(config.repetitions):
        for number, outcome in enumerate(outcomes):
            if outcome.failed is None:
                task = served(config, outcome.case, requests, first=repetition == 0, number=number)
                forget(files)
                found = answer(task, scratch / f"{number}-{repetition}")
                if isinstance(found, Failure):
                    outcome.failed = found.reason
                else:
                    outcome.runs.append({**found, "left_in_page_cache": remembered_bytes(files)})
            advance(1)
    return outcomes


def served(
    config: BenchConfig, case: Case, requests: dict[int, list[Request]], *, first: bool, number: int
) -> Served:
    """What a child is asked for a run of the case."""
    trace = None
    if config.trace_events and first and config.run_dir is not None:
        trace = config.run_dir / "timelines" / f"{number:02d}-{case.variant.label}.json"
    return Served(
        model=config.model,
        store=config.store,
        system=case.variant.system,
        budget=case.condition.budget,
        predictor=config.predictor,
        entries=config.entries,
        device=config.device,
        requests=requests[case.condition.batch],
        trace_events=trace,
    )


def first_difference(outcomes: Sequence[Outcome], expected: dict[int, Tokens]) -> str | None:
    """Return where tokens of one batch size first differ, in words; None if nowhere.

    Args:
        expected: by batch size; without one, the first case's first run is what others must equal.
    """
    known = {batch: ("plain Transformers", tokens) for batch, tokens in expected.items()}
    for outcome in outcomes:
        for repetition, run in enumerate(outcome.runs):
            named = f"{outcome.case}, run {repetition + 1}"
            whose, tokens = known.setdefault(outcome.case.condition.batch, (named, run["tokens"]))
            if run["tokens"] != tokens:
                return difference(run["tokens"], tokens, named, whose)
    return None


def difference(left: Tokens, right: Tokens, named: str, other: str) -> str:
    """The first place where two sides' tokens differ."""
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        for row, (mine, theirs) in enumerate(zip(a, b, strict=True)):
            for place, (one, two) in enumerate(zip(mine, theirs, strict=True)):
                if one != two:
                    return (
                        f"request {number}, row {row}, new token {place}: {named} gave {one}, "
                        f"{other} gave {two}"
                    )
    raise AssertionError("they are equal")
