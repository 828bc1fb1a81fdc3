"""Live variants on one machine: throughput, and whether the pipeline is full.

Klotski's figure 14 and its table 3.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, median_low

from pydantic import TypeAdapter

from benchmarks.klotski.config import KlotskiConfig
from benchmarks.klotski.rows import (
    FailedRow,
    LiveRow,
    VariantFigures,
    VariantRequest,
)
from benchmarks.klotski.variants import VariantReport
from benchmarks.process import ProcessFailed, python_module, start_worker
from benchmarks.reports import print_line

TIMEOUT_SECONDS = 600.0


def list_requests(config: KlotskiConfig) -> dict[str, VariantRequest]:
    """Returns the request of every variant by name, none twice."""
    base = VariantRequest(
        model=str(config.model.absolute()),  # processes have their own folders
        variant="klotski",
        budget=config.budget,
        batch_size=config.batch_size,
        n=config.n,
        num_batches=config.n,
        prompt_tokens=config.prompt_tokens,
        new_tokens=config.max_new_tokens,
        threads=config.threads,
    )
    single = replace(base, n=1, num_batches=1)
    requests = {
        "single batch, on demand": replace(single, variant="on-demand"),
        "simple pipeline": replace(single, variant="simple"),
        "+ multi batches": replace(base, variant="multi"),
        "+ only hot experts": replace(base, variant="hot"),
        "+ order (klotski)": base,
        "caches on disk": replace(base, kv_budget="16MiB"),
    }
    for size in config.sizes:
        for n in config.groups:
            request = replace(base, batch_size=size, n=n, num_batches=n)
            if request not in requests.values():
                requests[f"batch {size}, n {n}"] = request
    return requests


def run_once(request: VariantRequest) -> VariantReport:
    """Runs a variant in a new process, from a cold start.

    Raises:
        ProcessFailed: it failed or did not end.
    """
    with tempfile.TemporaryDirectory(prefix="moecast-klotski-") as scratch:
        worker = start_worker(
            python_module("benchmarks.klotski.variants"),
            request,
            Path(scratch),
            environment={"OMP_NUM_THREADS": str(request.threads)},
        )
        report = worker.finish(TIMEOUT_SECONDS)
    return TypeAdapter(VariantReport).validate_python(report)


class AnswersDiffer(RuntimeError):
    """Two variants gave a prompt different tokens."""


Answers = dict[tuple[int, int], list[int]]
"""Tokens by the size of the batch and the prompt."""


def check_answers(known: Answers, name: str, batch_size: int, answers: Sequence[list[int]]) -> None:
    """Compares a run's answers with those of the runs before it, and adds new ones.

    Raises:
        AnswersDiffer: they are not equal.
    """
    for place, tokens in enumerate(answers):
        if known.setdefault((batch_size, place), tokens) != tokens:
            raise AnswersDiffer(f"{name}: prompt {place} has other tokens")


def summarize_variant(name: str, request: VariantRequest, runs: Sequence[VariantReport]) -> LiveRow:
    """Returns the median throughput with the other figures of the run with the lower median."""
    speeds = [run.tokens_per_second for run in runs]
    typical = vars(runs[speeds.index(median_low(speeds))])
    figures = {key: typical[key] for key in VariantFigures.__dataclass_fields__}
    settings = vars(request) | {"model": Path(request.model).name}
    return LiveRow(
        **(settings | figures | {"tokens_per_second": median(speeds)}), name=name, speeds=speeds
    )


def run_live(config: KlotskiConfig) -> list[LiveRow | FailedRow]:
    """Runs all variants, interleaved; returns a row for each.

    Raises:
        AnswersDiffer: two variants gave a prompt different tokens.
    """
    requests = list_requests(config)
    known: Answers = {}
    runs: dict[str, list[VariantReport]] = {name: [] for name in requests}
    failed: dict[str, str] = {}
    for repetition in range(1, config.repetitions + 1):
        for name, request in requests.items():
            if name in failed:
                continue
            try:
                report = run_once(request)
            except ProcessFailed as error:
                failed[name] = str(error)
                print_line(f"{name}: {error}")
                continue
            check_answers(known, name, request.batch_size, report.answers)
            runs[name].append(report)
            print_line(
                f"{repetition}/{config.repetitions} {name}: {report.tokens_per_second:.2f} tokens/s"
            )
    return [
        FailedRow(**(vars(request) | {"model": config.model.name}), name=name, failed=failed[name])
        if name in failed
        else summarize_variant(name, request, runs[name])
        for name, request in requests.items()
    ]
