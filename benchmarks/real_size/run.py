"""`python -m benchmarks real-size`: a model of real size, served from small budgets.

Weights are random, so that no checkpoint has to be downloaded; which experts a token needs comes
from a log of the real model's routing. Every run is in its own process, from an empty arena, with
nothing of the model in the page cache; a first request fills the arena and is in no figure.
"""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.real_size.computation import ComputationTask
from benchmarks.real_size.config import RealSizeConfig
from benchmarks.real_size.model import DTYPE, RandomModel, read_shape, write_random_model
from benchmarks.reports import describe_machine, print_line, write_report
from benchmarks.served import run_task, serve_once
from predictors.errors import MoecastError
from runtime.commands.progress import progress
from runtime.config import DenseFormat, ModelConfig, StoreConfig, SystemConfig
from runtime.hf.forced_routing import require_fit
from runtime.presets import load_system
from runtime.sim.routing_log import RoutingLog, read_routing_log
from runtime.store.base import max_slot_bytes
from runtime.store.packed.store import open_store
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.rows import make_row
from runtime.tools.bench.tasks import BenchRequest, CaseOutcome, ServeTask, cached_bytes
from runtime.tools.comparison import Case, Condition, Variant

FIRST_TOKEN = 4
"""First random id: special tokens come before it."""


@dataclass(frozen=True, kw_only=True)
class RealSizeRow:
    """One system at one budget: medians over the repetitions, and over all decode steps."""

    budget: str
    system: str
    predictor: str | None
    """Kind that forecasts."""
    note: str | None
    """Deviation from the system's definition."""
    budget_bytes: int
    experts_in_memory: float
    """Share of all experts that the budget holds."""
    peak_memory_bytes: float
    overhead_bytes: float
    """Peak memory above the weights that are not experts and the budget."""
    ttft_seconds: float
    tpot_mean_seconds: float
    tpot_median_seconds: float
    tpot_p95_seconds: float
    tokens_per_second: float
    """New tokens over the whole request, its prompt included."""
    hit_rate: float
    prefill_hit_rate: float
    bytes_per_token: float
    """Bytes of experts that a decode step moved."""
    link_share: float
    """Share of decode time in which the link was busy."""
    read_bytes_per_second: float | None
    stall_share: float
    """Share of decode time in which the computation waited for experts."""
    control_seconds_per_layer: float
    """Mean TPOT less waiting and `computing_seconds`, for each layer."""
    page_cache_bytes: float | None
    """Bytes of the model's files that the run left in the page cache."""


def run_real_size(config: RealSizeConfig) -> dict[str, Any]:
    """Write the model unless it is there, and serve it with every system from every budget.

    Raises:
        MoecastError: a log that does not fit, no room on the disk, or a run failed.
    """
    machine = describe_machine()
    log = read_routing_log(config.routing)
    systems = [load_system(name) for name in config.system]
    own_top_k = read_shape(config.shape, top_k=None)["num_experts_per_tok"]
    shape = read_shape(config.shape, top_k=log.experts_NLK.shape[2])
    require_log(config, log, shape)
    model = make_model(config, shape)
    served = ModelConfig(
        name="real-size", id=str(model.folder), dtype=DTYPE, dense_format=DenseFormat.INT8
    )
    bench = BenchConfig(
        model=served,
        store=StoreConfig(path=model.store),
        system=systems,
        routing=config.routing,
        device="cpu",
    )
    requests = make_requests(config, vocab_size=shape["vocab_size"])
    outcomes = [
        CaseOutcome(Case(Variant(label=system.name, system=system), Condition(budget, 1)))
        for budget in config.budget
        for system in systems
    ]
    with tempfile.TemporaryDirectory() as scratch:
        computing = run_task(
            "benchmarks.real_size.computation:run_computation_task",
            ComputationTask(model=served, store=bench.store),
            Path(scratch, "computation"),
        )["seconds"]
        print_line(f"computation alone: {1e3 * computing:.1f} ms a token")
        for repetition in range(config.repetitions):
            for number, outcome in enumerate(outcomes):
                system = outcome.case.variant.system
                task = ServeTask(
                    config=replace(bench, predictor=choose_predictor(system)),
                    case=outcome.case,
                    requests=requests,
                )
                # The weights that are not experts are read through the page cache, once.
                run = serve_once(
                    task, [model.folder, model.store], Path(scratch, f"{repetition}-{number}")
                )
                left = cached_bytes([*model.store.iterdir()])
                outcome.runs.append(replace(run, page_cache_bytes=left))
                mean = sum(run.tpot_seconds) / len(run.tpot_seconds)
                print_line(f"{outcome.case}: {1e3 * mean:.1f} ms a token")
    store = open_store(model.store, None)
    store.close()
    num_layers, expert_bytes = store.num_layers, max_slot_bytes(store)
    experts_bytes = num_layers * store.num_experts * expert_bytes
    rows = [
        describe_outcome(
            outcome,
            experts_bytes=experts_bytes,
            computing_seconds=computing,
            num_layers=num_layers,
        )
        for outcome in outcomes
    ]
    write_report(
        config,
        machine=machine,
        routing=config.routing.name,
        log_tokens=len(log.experts_NLK),
        num_layers=num_layers,
        num_experts=store.num_experts,
        top_k=shape["num_experts_per_tok"],
        # Experts per token of the model's own configuration; the log has fewer.
        model_top_k=own_top_k,
        expert_bytes=expert_bytes,
        experts_bytes=experts_bytes,
        dense_bytes=outcomes[0].runs[0].weights_bytes,
        # A token whose experts all are in memory, without engine, probes and reading threads.
        computing_seconds=computing,
        new_tokens=config.max_new_tokens,
        rows=rows,
    )
    return {"rows": len(rows), "output": str(config.output)}


def require_log(config: RealSizeConfig, log: RoutingLog, shape: Mapping[str, Any]) -> None:
    """Refuse a log of another shape, or one that would have to begin again during a run.

    Raises:
        MoecastError: the message has the log's and the model's or the run's size.
    """
    require_fit(
        log.experts_NLK,
        num_layers=shape["num_hidden_layers"],
        num_experts=shape["num_experts"],
    )
    # The last new token is never routed.
    lengths = [config.warm_up_tokens] + [config.max_new_tokens] * config.requests
    needed = sum(config.prompt_tokens + length - 1 for length in lengths)
    if needed > len(log.experts_NLK):
        raise MoecastError(
            f"routing: the log has {len(log.experts_NLK)} tokens, a run routes {needed}: what it "
            "repeats would be in memory already. Lower prompt_tokens, warm_up_tokens, requests or "
            "max_new_tokens"
        )


def make_model(config: RealSizeConfig, shape: Mapping[str, Any]) -> RandomModel:
    """Write the model below `work`, or verify what an earlier run wrote."""
    name = f"top{shape['num_experts_per_tok']}-seed{config.seed}"
    total = shape["num_hidden_layers"] * shape["num_experts"]
    print_line(f"writing or verifying {config.work / name}")
    with progress(Console(stderr=True), "writing", total=total) as advance:
        return write_random_model(shape, config.work / name, seed=config.seed, advance=advance)


def make_requests(config: RealSizeConfig, *, vocab_size: int) -> list[BenchRequest]:
    """Make the request that fills the arena and the measured ones, of random tokens."""
    random = Random(config.seed)
    lengths = [(config.warm_up_tokens, False)]
    lengths += [(config.max_new_tokens, True)] * config.requests
    return [
        BenchRequest(
            (tuple(random.choices(range(FIRST_TOKEN, vocab_size), k=config.prompt_tokens)),),
            new_tokens,
            is_measured,
        )
        for new_tokens, is_measured in lengths
    ]


def choose_predictor(system: SystemConfig) -> str | None:
    """Return the predictor in place of a trained one, which random weights have not.

    None where the system has its own way.
    """
    needs_one = system.prefetch and system.predictor is not None and not system.fallback
    return "correlation" if needs_one else None


def describe_outcome(
    outcome: CaseOutcome, *, experts_bytes: int, computing_seconds: float, num_layers: int
) -> RealSizeRow:
    """Make the row of a system at a budget."""
    row, runs = make_row(outcome, {}), outcome.runs
    steps = [seconds for run in runs for seconds in run.tpot_seconds]
    mean, stalled = statistics.fmean(steps), sum(run.decode["stall_seconds"] for run in runs)
    return RealSizeRow(
        budget=row.budget,
        system=row.system,
        predictor=row.predictor,
        note=row.note,
        budget_bytes=runs[0].arena_bytes,
        experts_in_memory=min(1.0, runs[0].arena_bytes / experts_bytes),
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
        overhead_bytes=max(
            run.peak_memory_bytes - run.weights_bytes - run.arena_bytes for run in runs
        ),
        ttft_seconds=statistics.median(seconds for run in runs for seconds in run.ttft_seconds),
        tpot_mean_seconds=mean,
        tpot_median_seconds=statistics.median(steps),
        tpot_p95_seconds=float(np.percentile(steps, 95)),
        tokens_per_second=known(row.tokens_per_second),
        hit_rate=known(row.decode_hit_rate),
        prefill_hit_rate=known(row.prefill_hit_rate),
        bytes_per_token=known(row.bytes_moved_per_decode_step),
        link_share=known(row.decode_link_share),
        read_bytes_per_second=row.read_bytes_per_second,
        stall_share=known(row.decode_stall_share),
        control_seconds_per_layer=(mean - stalled / len(steps) - computing_seconds) / num_layers,
        page_cache_bytes=row.left_in_page_cache,
    )


def known(value: float | None) -> float:
    """Return a figure that every run has."""
    assert value is not None
    return value
