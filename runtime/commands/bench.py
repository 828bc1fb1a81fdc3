"""`moecast bench`: systems side by side on this machine, every token compared."""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from predictors.errors import MoecastError
from predictors.registry import separate_run
from runtime.accelerator import is_accelerator
from runtime.commands.progress import print_line, progress
from runtime.engine.devices import choose_device
from runtime.hf.forced_routing import MEANINGLESS
from runtime.profiling.bandwidth import measure_disk_bandwidth
from runtime.profiling.facts import hardware, versions
from runtime.store.model_check import list_weight_files
from runtime.store.model_source import resolve
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.rows import (
    BenchRow,
    compare_simulated,
    make_rows,
    print_tables,
    simulated_rows,
    sort_by_condition,
)
from runtime.tools.bench.tasks import (
    LIMIT_SECONDS,
    BenchRequest,
    CaseOutcome,
    RequestsTask,
    Tokens,
    find_replayed,
    find_token_difference,
    list_conditions,
    live_cases,
    make_requests,
    run_rounds,
)
from runtime.tools.child_process import ChildFailure, run_in_child
from runtime.tools.report.provenance import describe_origin, read_provenance
from runtime.tools.verify.reference import require_memory

NOT_SIMULATED = (
    "systems that know the future, and the bound, are left out: the times that they are replayed "
    "with are measured on a CPU, and runs compute on {device}"
)


class TokensDiffer(RuntimeError):
    """An internal error: two cases generated different tokens for the same prompts."""


class NothingRan(RuntimeError):
    """No variant could be run."""


def run(config: BenchConfig) -> dict[str, Any]:
    """Run the comparison, print it and write the report next to the results."""
    predictor, entries = separate_run(config.predictor, config.entries)
    config = replace(config, predictor=predictor, entries=entries)
    folder = resolve(config.model)
    requests, description = make_requests(config, folder)
    if config.verify:
        hint = "leave out verify=true (systems are compared with each other)"
        require_memory(folder, config.model.dtype, otherwise=hint)
    if config.routing is not None:
        print_line(MEANINGLESS, Console(stderr=True))
    cases = live_cases(config)
    has_simulated = bool(find_replayed(config.system))
    device = choose_device(config.device)
    if has_simulated and is_accelerator(device):
        print_line(NOT_SIMULATED.format(device=device), Console(stderr=True))
        has_simulated = False
    # Measured before anything runs: the load of other programs.
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    machine = {
        "hardware": hardware(folder),
        "versions": versions(),
        "disk": measure_disk_bandwidth(list_weight_files(folder), seed=config.seed),
        "load_average_at_start": load_average,
    }
    total = len(cases) * config.repetitions + config.verify + 2 * has_simulated
    with (
        tempfile.TemporaryDirectory(prefix="moecast-bench-") as scratch,
        progress(Console(stderr=True), "benchmark", total=total) as advance,
    ):
        expected = plain_tokens(config, requests, Path(scratch)) if config.verify else {}
        advance(int(config.verify))
        simulations = []
        if has_simulated:
            simulations.append(simulate(config, requests, Path(scratch) / "before"))
            advance(1)
        outcomes = run_rounds(
            config, cases, requests, folder=folder, scratch=Path(scratch), advance=advance
        )
        if has_simulated:
            simulations.append(simulate(config, requests, Path(scratch) / "after"))
            advance(1)
    measured, simulated = choose_fastest(simulations)
    live = make_rows(outcomes)
    rows = sort_by_condition([*live, *compare_simulated(simulated, live)])
    about = describe_comparison(config, description)
    print_tables(Console(), config.model.name, rows)
    print_line(about)
    check(outcomes, expected)
    results = {
        "origin": describe_origin(config.run_dir),
        "model": config.model.name,
        "folder": str(folder),
        "compared": about,
        "note": None if config.routing is None else MEANINGLESS,
        "tokens_equal": True,
        "equal_to_plain_transformers": True if config.verify else None,
        "machine": machine,
        "measured": measured,
        "rows": [asdict(row) for row in rows],
    }
    if config.run_dir is not None:
        from runtime.tools.bench.html_report import make_report

        page = make_report(results, rows, read_provenance(config.run_dir))
        print_line(f"report: {page.write(config.run_dir)}", Console(stderr=True))
    return results


def describe_comparison(config: BenchConfig, prompts: str) -> str:
    """Describe what was run, for the reader of the table."""
    tokens = config.warm_up_tokens
    forced = "" if config.routing is None else f"; {MEANINGLESS} ({config.routing.name})"
    warm_up = f"a warm-up request of {tokens} tokens, until links rest" if tokens else "no warm-up"
    return (
        f"each run in its own process, from an empty arena: {warm_up}, then "
        f"{config.requests} requests of {config.max_new_tokens} greedy tokens for each row of the "
        f"batch, from {prompts}; {config.repetitions} repetitions, systems in turns, there "
        f"and back, medians; means and percentiles over all decode steps; speed-ups within a "
        f"repetition{forced}"
    )


def plain_tokens(
    config: BenchConfig, requests: dict[int, list[BenchRequest]], scratch: Path
) -> dict[int, Tokens]:
    """Generate with plain Transformers; tokens by batch size.

    Raises:
        MoecastError: it could not be run.
    """
    result = run_in_child(
        "runtime.tools.bench.serve:run_plain_task",
        RequestsTask(config=config, requests=requests),
        scratch / "plain",
        limit_seconds=LIMIT_SECONDS,
    )
    if isinstance(result, ChildFailure):
        raise MoecastError(
            f"verify=true: plain Transformers could not be run: {result.reason}; leave verify out"
        )
    return {int(batch): tokens for batch, tokens in result.items()}


def simulate(
    config: BenchConfig, requests: dict[int, list[BenchRequest]], scratch: Path
) -> tuple[dict[str, Any] | None, list[BenchRow]]:
    """Replay systems that know the future; returns the machine's times, and rows."""
    result = run_in_child(
        "runtime.tools.bench.bound:simulate_conditions",
        RequestsTask(config=config, requests=requests),
        scratch,
        limit_seconds=LIMIT_SECONDS,
    )
    if not isinstance(result, ChildFailure):
        return result["hardware"], [BenchRow(**row) for row in result["rows"]]
    rows = [
        row
        for condition in list_conditions(config)
        for row in simulated_rows(condition, config.system, result.reason)
    ]
    return None, rows


def choose_fastest(
    simulations: Sequence[tuple[dict[str, Any] | None, list[BenchRow]]],
) -> tuple[dict[str, Any] | None, list[BenchRow]]:
    """Return the simulation with the machine's times at which a decode step is computed fastest.

    A machine that other work has slowed while it was measured would give a bound that runs beat.
    """
    return min(
        simulations,
        key=lambda row: math.inf if row[0] is None else row[0]["step_seconds"],
        default=(None, []),
    )


def check(outcomes: list[CaseOutcome], expected: dict[int, Tokens]) -> None:
    """Check that all runs generated the same tokens.

    Raises:
        TokensDiffer: one did not.
        NothingRan: there are no runs.
    """
    if not any(outcome.runs for outcome in outcomes):
        raise NothingRan(f"no variant could be run; the first failed with: {outcomes[0].failed}")
    different = find_token_difference(outcomes, expected)
    if different is not None:
        raise TokensDiffer(f"the output depends on the system or the budget: {different}")
    num_runs = sum(len(outcome.runs) for outcome in outcomes)
    plain = " and plain Transformers" if expected else ""
    print_line(f"the same tokens in all {num_runs} runs{plain}")
