"""`python -m runtime bench`: systems side by side on this machine, every token compared."""

import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from predictors.errors import MoecastError
from runtime.commands.progress import progress
from runtime.engine.machine import available_memory_bytes
from runtime.profiling.bandwidth import disk_bandwidth
from runtime.profiling.facts import hardware, versions
from runtime.store.model_source import resolve
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.figures import bound_rows, rows_of
from runtime.tools.bench.process import answer
from runtime.tools.bench.requests import Request, requests_of
from runtime.tools.bench.rounds import Outcome, Tokens, first_difference, run_rounds
from runtime.tools.bench.show import in_cells, show, wide_console
from runtime.tools.bench.tasks import Failure, Plain, Replayed
from runtime.tools.bench.variants import find_bounds, list_conditions, live_cases
from runtime.tools.doctor.files import weights_files
from runtime.tools.verify.reference import plain_bytes


class TokensDiffer(RuntimeError):
    """Ours, not the user's: two cases gave different tokens for the same prompts."""


class NothingRan(RuntimeError):
    """No variant ran."""


def run(config: BenchConfig) -> dict[str, Any]:
    """Runs, shows and returns the comparison; the page is written beside the results."""
    console = wide_console()
    folder = resolve(config.model)
    requests, what = requests_of(config, folder)
    if config.verify:
        require_memory(folder, config)
    cases = live_cases(config)
    bounds = find_bounds(config.system)
    # Before anything runs: how busy the machine was with other things.
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    machine = {
        "hardware": hardware(folder),
        "versions": versions(),
        "disk": disk_bandwidth(weights_files(folder), seed=config.seed),
        "load_average_at_start": load_average,
    }
    total = len(cases) * config.repetitions + config.verify + bool(bounds)
    with (
        tempfile.TemporaryDirectory(prefix="moecast-bench-") as scratch,
        progress(console, "benchmark", total=total) as advance,
    ):
        expected = plain_tokens(config, requests, Path(scratch)) if config.verify else {}
        advance(int(config.verify))
        outcomes = run_rounds(
            config, cases, requests, folder=folder, scratch=Path(scratch), advance=advance
        )
        replayed: dict[str, Any] = {"hardware": None, "rows": []}
        if bounds:
            replayed = replay_bounds(config, requests, Path(scratch))
            advance(1)
    live = rows_of(outcomes)
    rows = in_cells([*live, *bound_rows(replayed["rows"], live)])
    about = described(config, what)
    show(console, config.model.name, rows)
    console.print(about, highlight=False, soft_wrap=True, markup=False)
    check(outcomes, expected, console)
    results = {
        "model": config.model.name,
        "folder": str(folder),
        "compared": about,
        "tokens_equal": True,
        "equal_to_plain_transformers": True if config.verify else None,
        "machine": machine,
        "measured": replayed["hardware"],
        "rows": rows,
    }
    write_page(config, results, console)
    return results


def described(config: BenchConfig, what: str) -> str:
    """What was run, for the reader of the table."""
    warm_up = (
        f"one of {config.warm_up_tokens} tokens to warm up"
        if config.warm_up_tokens
        else "no warm-up"
    )
    return (
        f"each run in a process of its own, from an empty arena: {warm_up}, then "
        f"{config.requests} requests of {config.max_new_tokens} greedy tokens for each row of the "
        f"batch, from {what}; {config.repetitions} repetitions, systems in turns, medians; "
        "percentiles over all decode steps; speed-ups within a repetition"
    )


def require_memory(folder: Path, config: BenchConfig) -> None:
    """Raises MoecastError when plain Transformers would not fit."""
    needed, available = plain_bytes(folder, config.model.dtype), available_memory_bytes()
    if needed > available:
        raise MoecastError(
            f"verify=true: plain Transformers needs {needed} bytes for all experts of {folder}, "
            f"{available} are available; leave verify out (systems are compared with each other)"
        )


def plain_tokens(
    config: BenchConfig, requests: dict[int, list[Request]], scratch: Path
) -> dict[int, Tokens]:
    """What plain Transformers answers, by batch size.

    Raises:
        MoecastError: it could not be run.
    """
    task = Plain(model=config.model, device=config.device, requests=requests)
    found = answer(task, scratch / "plain")
    if isinstance(found, Failure):
        raise MoecastError(
            f"verify=true: plain Transformers could not be run: {found.reason}; leave verify out"
        )
    return {int(batch): tokens for batch, tokens in found.items()}


def replay_bounds(
    config: BenchConfig, requests: dict[int, list[Request]], scratch: Path
) -> dict[str, Any]:
    """The bounds' rows; where they can not be made, rows that say why."""
    conditions, bounds = list_conditions(config), find_bounds(config.system)
    task = Replayed(
        model=config.model,
        systems=bounds,
        conditions=conditions,
        device=config.device,
        requests=requests,
    )
    found = answer(task, scratch / "bounds")
    if not isinstance(found, Failure):
        return found
    rows = [
        {
            "budget": condition.budget,
            "batch": condition.batch,
            "system": system.name,
            "failed": found.reason,
        }
        for condition in conditions
        for system in bounds
    ]
    return {"hardware": None, "rows": rows}


def check(outcomes: list[Outcome], expected: dict[int, Tokens], console: Console) -> None:
    """Says that every variant gave the same tokens.

    Raises:
        TokensDiffer: one did not.
        NothingRan: there are none.
    """
    if not any(outcome.runs for outcome in outcomes):
        raise NothingRan(f"no variant ran; the first one: {outcomes[0].failed}")
    different = first_difference(outcomes, expected)
    if different is not None:
        raise TokensDiffer(f"the output depends on the system or the budget: {different}")
    num_runs = sum(len(outcome.runs) for outcome in outcomes)
    beside = " and plain Transformers" if expected else ""
    console.print(f"the same tokens in all {num_runs} runs{beside}", highlight=False)


def write_page(config: BenchConfig, results: dict[str, Any], console: Console) -> None:
    """report.html with its figures, beside results.json."""
    if config.run_dir is None:
        return
    from runtime.tools.bench.page import page_of

    path = page_of(results).write(config.run_dir)
    console.print(str(path), highlight=False, soft_wrap=True, markup=False)
