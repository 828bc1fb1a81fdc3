"""`python -m train reuse`: the eviction forecaster, trained, exported, and set beside every policy.

Shape suffixes: L layers, E experts, D hidden size.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from rich.console import Console
from rich.table import Table

from collect.traces import Trace, TraceSignal
from collect.traces.step import Phase, Step
from predictors.base import Predictor
from predictors.reuse.forecaster import Reuse
from runtime.config import SystemConfig
from runtime.policy.counters import added
from runtime.sim.hardware import Hardware
from runtime.sim.replay import Step as ReplayStep
from runtime.sim.replay import replay
from train.baselines import router_weights
from train.config import TrainConfig
from train.fit import FitSettings, Fitted, digest_of, fit
from train.loggers import finish, make_logger
from train.pipeline import machine
from train.quantise import quantised
from train.replay import budget_slots, first_tokens
from train.reuse import KIND, WIDTH, ReuseFamily
from train.reuse_data import ReuseData
from train.tracing import trace_for
from zoo.entry import write_entry

CHECKPOINT = "reuse.ckpt"
POLICIES = (
    "lru",
    "lfu",
    "decayed-lfu",
    "least-stale",
    "moe-infinity-sequence",
    "moe-infinity-request",
    KIND,
    "belady",
)
BUDGETS = ("10%", "25%", "50%", "75%")
ON_DEMAND = SystemConfig(name="on-demand", prefetch=False, chunked=False)
SIGNALS = (TraceSignal.GATE_INPUT, TraceSignal.EXPERTS)

DEFINITION = (
    "hit rate: share of needed experts that are in the arena when their router asks, nothing "
    "prefetched; gap closed: (hit rate - LRU) / (Belady - LRU), held-out requests"
)


def learn_reuse(config: TrainConfig, trace: Trace, *, run_dir: Path) -> tuple[Reuse, Fitted]:
    """Trains on the trace's training requests, one after another as a server runs them; the pass
    that keeps best on requests set aside. Goes on from the run folder's checkpoint."""
    routers_LED, biases = router_weights(config.model, trace.spec)
    biases_LE = np.zeros(routers_LED.shape[:2], np.float32) if biases is None else biases
    settings = FitSettings(
        kinds=(KIND,),
        width=WIDTH,
        loss="bce",
        max_epochs=config.max_epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        weight_decay=config.weight_decay,
        seed=config.seed,
        patience=config.patience,
        precision=config.precision,
        devices=config.devices,
    )
    logger = make_logger(config.logger, run_dir=run_dir, settings={"trace": trace.digest})
    seed_everything(config.seed, verbose=False)
    family = ReuseFamily(trace.spec, routers_LED, biases_LE)
    data = ReuseData(trace, routers_LED, biases_LE, batch_size=config.batch_size, seed=config.seed)
    status = "failed"
    try:
        fitted = fit(
            trace,
            [family],
            settings,
            run_dir=run_dir,
            logger=logger,
            fresh=config.fresh,
            data=data,
            checkpoint_name=CHECKPOINT,
        )
        status = "success"
    finally:
        finish(logger, status)
    made = family.export(trace.spec)[KIND]
    made = quantised(made) if config.predictor.int8 else made
    assert isinstance(made, Reuse)
    return made, fitted


def token_by_token(steps: Iterable[Step], num_tokens: int) -> Iterator[Step]:
    """Every token, prompts included, as a step of its own."""
    left = num_tokens
    for step in steps:
        for place in range(min(left, step.num_tokens)):
            token = step.tokens_T[place : place + 1]
            yield Step(Phase.DECODE, step.request, step.first_row + place, token, step.read)
        left -= min(left, step.num_tokens)


def hit_rates(
    trace: Trace, forecaster: Reuse, hardware: Hardware, *, num_tokens: int
) -> dict[str, dict[str, dict[str, dict[str, float | None]]]]:
    """Stream and arena, budget, policy: hit rate and share of the gap closed, decode and prefill.

    `generated`: prompts in one step, then token by token; `every token`: prompts token by token
    too, as many as `num_tokens`.
    """
    generated = list(first_tokens(trace.steps("held_out"), num_tokens))
    each = list(token_by_token(trace.steps("held_out"), num_tokens))
    everything = replace(ON_DEMAND, per_layer=False)
    tables: dict[str, Any] = {}
    streams: tuple[tuple[str, Sequence[ReplayStep], SystemConfig], ...] = (
        ("every token, per-layer", each, ON_DEMAND),
        ("every token, global", each, everything),
        ("generated, per-layer", generated, ON_DEMAND),
        ("generated, global", generated, everything),
    )
    for name, steps, system in streams:
        tables[name] = {
            budget: _compared(steps, forecaster, system, trace, hardware, budget)
            for budget in BUDGETS
        }
    return tables


def _compared(
    steps: Sequence[ReplayStep],
    forecaster: Reuse,
    system: SystemConfig,
    trace: Trace,
    hardware: Hardware,
    budget: str,
) -> dict[str, dict[str, float | None]]:
    slots = budget_slots(budget, trace.spec, hardware)
    rates: dict[str, dict[str, float | None]] = {}
    for policy in POLICIES:
        keeper: Predictor | None = None
        if policy == KIND:
            keeper = Reuse.from_files(trace.spec, forecaster.files(), {})
        stats = replay(
            steps,
            None,
            spec=trace.spec,
            system=replace(system, eviction=policy),
            hardware=hardware,
            budget_slots=slots,
            keeper=keeper,
        )
        rates[policy] = {
            "decode": added(stats.decode).hit_rate,
            "prefill": added(stats.prefill).hit_rate,
        }
    for phase in ("decode", "prefill"):
        low, high = rates["lru"][phase], rates["belady"][phase]
        for one in rates.values():
            one[f"{phase}_gap_closed"] = share_closed(low, one[phase], high)
    return rates


def share_closed(low: float | None, found: float | None, high: float | None) -> float | None:
    """Of the gap between two rates; null where one was not measured or there is no gap."""
    if low is None or found is None or high is None or high <= low:
        return None
    return (found - low) / (high - low)


def gap_table(tables: Mapping[str, Any]) -> Table:
    """A row for each stream and budget, a column for each policy: hit rate (share of the gap)."""
    table = Table()
    for column in ("requests, arena", "budget", *POLICIES):
        table.add_column(column)
    for name, budgets in tables.items():
        for budget, rates in budgets.items():
            cells = []
            for policy in POLICIES:
                rate, gap = rates[policy]["decode"], rates[policy]["decode_gap_closed"]
                shown = "-" if rate is None else f"{rate:.3f}"
                cells.append(shown if gap is None else f"{shown} ({gap:.0%})")
            table.add_row(name, budget, *cells)
    return table


def train_reuse(config: TrainConfig) -> dict[str, Any]:
    """The forecaster's part of a run; returns what results.json holds."""
    assert config.run_dir is not None
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    trace = trace_for(config, SIGNALS, needed=SIGNALS)
    sys.stderr.write(f"training reuse on {len(trace.rows('train')):,} tokens\n")
    forecaster, fitted = learn_reuse(config, trace, run_dir=config.run_dir)
    sys.stderr.write("replaying held-out requests under every eviction policy\n")
    hardware = machine(config.hardware, config.shape, config.model)
    tables = hit_rates(trace, forecaster, hardware, num_tokens=config.replay_tokens)
    console = Console()
    console.print(DEFINITION, highlight=False)
    console.print(gap_table(tables))
    entry = config.run_dir / "entries" / KIND
    of_interest = tables["generated, per-layer"]
    write_entry(
        entry,
        name=f"{config.model.name}/{KIND}",
        kind=KIND,
        options={},
        spec=trace.spec,
        signals=Reuse.signals,
        files=forecaster.files(),
        metrics={
            "held_out": {
                f"{what}_{budget.rstrip('%')}": of_interest[budget][KIND][key]
                for budget in BUDGETS
                for what, key in (("hit_rate", "decode"), ("gap_closed", "decode_gap_closed"))
            },
            "definitions": {"hit_rate": DEFINITION},
            "tables": tables,
        },
        trace_digest=trace.digest,
        parity={},
        card_extra=f"{DEFINITION}; generated tokens, an arena for each layer.",
    )
    return {
        "model": trace.spec.as_dict(),
        "trace": {"digest": trace.digest, "tokens": trace.num_tokens},
        "definition": DEFINITION,
        "hit_rates": tables,
        "training": {
            "seconds": round(fitted.seconds, 3),
            "best_pass": fitted.best_pass,
            "validation": fitted.validation_accuracy,
            "weights_digest": digest_of(fitted.families),
        },
        "entries": {KIND: str(entry)},
    }
