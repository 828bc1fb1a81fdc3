"""`reuse`, the eviction forecaster: trained, exported, set beside every policy, in a zoo entry."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from rich.console import Console

from collect.traces import Trace, TraceSignal
from predictors.reuse.forecaster import ReusePredictor
from train.baselines import router_weights
from train.config import TrainConfig
from train.fit import Fitted, fit, settings_for
from train.kept import BUDGETS, DEFINITION, gap_table, hit_rates
from train.loggers import finish, make_logger
from train.pipeline import machine
from train.quantise import quantised
from train.reuse import KIND, WIDTH, ReuseFamily
from train.reuse_data import ReuseData
from train.tracing import trace_for
from zoo.entry import write_entry

CHECKPOINTS = "checkpoints/reuse"
SIGNALS = (TraceSignal.GATE_INPUT, TraceSignal.EXPERTS)


def learn_reuse(
    config: TrainConfig, trace: Trace, *, run_dir: Path
) -> tuple[ReusePredictor, Fitted]:
    """Trains on the trace's training requests, one after another as a server runs them.

    The pass that keeps best on requests set aside. Goes on from the run folder's checkpoint.
    """
    routers_LED, biases = router_weights(config.model, trace.spec)
    biases_LE = np.zeros(routers_LED.shape[:2], np.float32) if biases is None else biases
    settings = settings_for(config, (KIND,), width=WIDTH)
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
            checkpoints=CHECKPOINTS,
        )
        status = "success"
    finally:
        finish(logger, status)
    made = family.export(trace.spec)[KIND]
    made = quantised(made) if config.predictor.int8 else made
    assert isinstance(made, ReusePredictor)
    return made, fitted


def keeper_for(config: TrainConfig, trace: Trace) -> dict[str, Any]:
    """Trains the forecaster on this trace, compares and publishes it; its part of results.json."""
    assert config.run_dir is not None
    sys.stderr.write(f"training reuse on {len(trace.rows('train')):,} tokens\n")
    forecaster, fitted = learn_reuse(config, trace, run_dir=config.run_dir)
    sys.stderr.write("replaying held-out requests under every eviction policy\n")
    hardware = machine(config.hardware, config.shape, config.model)
    tables = hit_rates(trace, forecaster, hardware, num_tokens=config.replay_tokens)
    entry = config.run_dir / "entries" / KIND
    write_keeper(entry, forecaster, tables, trace, model_name=config.model.name)
    return {
        "definition": DEFINITION,
        "hit_rates": tables,
        "training": fitted.record(settings_for(config, (KIND,), width=WIDTH)),
        "entry": str(entry),
    }


def write_keeper(
    folder: Path,
    forecaster: ReusePredictor,
    tables: Mapping[str, Any],
    trace: Trace,
    *,
    model_name: str,
) -> None:
    """The zoo entry, with the hit rates as its metrics."""
    of_interest = tables["generated, per-layer"]
    write_entry(
        folder,
        name=f"{model_name}/{KIND}",
        kind=KIND,
        options={},
        spec=trace.spec,
        signals=ReusePredictor.signals,
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


def show_keeper(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the table of hit rates."""
    console = console or Console()
    console.print(found["definition"], highlight=False)
    console.print(gap_table(found["hit_rates"]))


def train_reuse(config: TrainConfig) -> dict[str, Any]:
    """`python -m train reuse`; returns what results.json holds."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    trace = trace_for(config, SIGNALS, needed=SIGNALS)
    found = keeper_for(config, trace)
    show_keeper(found)
    return {
        "model": trace.spec.as_dict(),
        "trace": {"digest": trace.digest, "tokens": trace.num_tokens},
        **found,
        "entries": {KIND: found["entry"]},
    }
