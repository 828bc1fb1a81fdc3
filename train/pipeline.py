"""The front door's steps: trace, training, export, parity, scores, zoo entries.

Each function is one step and takes what it needs; `commands.py` strings them together.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from collect.traces import Trace
from predictors.base import Predictor
from predictors.learned import Learned
from predictors.metrics import DEFINITIONS, good_pred
from runtime.config import HardwareConfig, ModelConfig, SystemConfig
from runtime.sim.hardware import Hardware, described
from train.baselines import fit_popularity, fit_token, make_skip
from train.evaluate import accuracy_table, blocks, score
from train.export import Parity, export, parity
from train.fit import Fitted
from train.replay import fetch_table, first_tokens
from zoo.entry import write_entry


def exported(fitted: Fitted, trace: Trace) -> tuple[dict[str, Learned], dict[str, Parity]]:
    """The learned predictors as they will run, and how well they agree with torch (held out)."""
    spec = trace.spec
    made = export(fitted.stack, fitted.edges, spec)
    batches = (
        np.stack([block.gate_input(layer) for layer in range(spec.num_layers)])
        for block in blocks(trace, "held_out")
    )
    return made, parity(fitted.stack, fitted.edges, made, batches, top_k=spec.top_k)


def baselines(trace: Trace, model: ModelConfig) -> dict[str, Predictor]:
    """The papers' predictors for this trace, by the name they have in the results."""
    skips = make_skip(model, trace.spec, horizons=(1, 2))
    named: dict[str, Predictor] = {
        "skip" if one.horizon == 1 else f"skip-{one.horizon}": one for one in skips
    }
    return {**named, "token": fit_token(trace), "popularity": fit_popularity(trace)}


def machine(config: HardwareConfig, model: ModelConfig) -> Hardware:
    """The described hardware, or this machine measured with the model."""
    if not config.measured:
        return described(config)
    from runtime.loading import load
    from runtime.sim.local import measure

    loaded = load(model)
    try:
        return measure(loaded)
    finally:
        loaded.moecast.close()


def scored(
    predictor: Predictor,
    trace: Trace,
    *,
    system: SystemConfig,
    hardware: Hardware,
    slots: int,
    replay_tokens: int,
) -> dict[str, Any]:
    """All figures of one predictor on the held-out requests; `slots` experts fit the budget."""
    spec = trace.spec
    table = accuracy_table(score(predictor, trace))
    table |= fetch_table(
        first_tokens(trace.steps("held_out"), replay_tokens),
        predictor,
        system=system,
        hardware=hardware,
        spec=spec,
        slots=slots,
    )
    pairs = zip(table["accuracy"], table["fetch_rate"], strict=True)
    table["good_pred"] = [good_pred(accuracy, rate) for accuracy, rate in pairs]
    table["mean_good_pred"] = good_pred(table["mean_accuracy"], table["mean_fetch_rate"])
    table["horizon"] = getattr(predictor, "horizon", None)
    return table


def write_entries(
    folder: Path,
    predictors: Mapping[str, Predictor],
    results: Mapping[str, dict[str, Any]],
    agreement: Mapping[str, Parity],
    trace: Trace,
    *,
    model_name: str,
    setting: str,
) -> dict[str, Path]:
    """One zoo entry for each predictor, with its held-out metrics; returns their folders."""
    written = {}
    for name, predictor in predictors.items():
        table = results[name]
        means = {key: table[f"mean_{key}"] for key in ("accuracy", "fetch_rate", "good_pred")}
        known = [one for one in table["accuracy"] if one is not None]
        write_entry(
            folder / name,
            name=f"{model_name}/{name}",
            kind=predictor.kind,
            options=predictor.options(),
            spec=predictor.spec,
            signals=predictor.signals,
            files=predictor.files(),
            metrics={
                "held_out": {
                    **means,
                    "worst_layer_accuracy": min(known),
                    "joint": table["mean_joint"],
                },
                "setting": setting,
                "definitions": DEFINITIONS,
                "layers": table,
            },
            trace_digest=trace.digest,
            parity=asdict(agreement[name]) if name in agreement else {},
            card_extra=f"fetch_rate and good_pred: {setting}.",
        )
        written[name] = folder / name
    return written
