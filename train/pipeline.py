"""Stages of `python -m train`: networks, export, parity and zoo entries."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.metrics import DEFINITIONS
from predictors.registry import FEED_FORWARD
from train.data import TraceBatches, TraceSubset
from train.errors import TrainError
from train.fit import FitSettings
from train.networks import PlainStack, network_specs
from train.parity import Parity, check_parity
from train.predictor_stack import PredictorStack
from train.quantise import quantise
from train.residual import ResidualStack
from train.routers import RouterWeights
from zoo.entry import write_entry

HORIZONS = 3
"""Layers that one state of `residual` is good for."""

PARITY_TOKENS = 1_024
"""Tokens compared at once, each as a separate request."""


def make_stacks(
    trace: Trace, routers: RouterWeights, settings: FitSettings, kinds: Collection[str]
) -> list[PredictorStack]:
    """Return the untrained networks of these kinds; the same ones for the same seed.

    Raises TrainError when the trace lacks a signal, or the model's routers cannot be copied.
    """
    from lightning.pytorch import seed_everything

    spec = trace.spec
    seed_everything(settings.seed, verbose=False)
    found: list[PredictorStack] = []
    plain = [kind for kind in FEED_FORWARD if kind in kinds]
    if plain:
        networks = network_specs(spec, plain)
        found.append(PlainStack(spec, networks, width=settings.width, loss=settings.loss))
    if "residual" in kinds:
        found.append(
            ResidualStack(
                spec,
                routers.matrices_LED,
                routers.biases_LE,
                horizons=HORIZONS,
                width=settings.width,
            )
        )
    for signal in {one for family in found for one in family.needs.signals}:
        if signal not in trace.signals:
            raise TrainError(
                f"trace={trace.where} has no {signal}, which {', '.join(kinds)} need: collect one "
                f"with signals=[{','.join(sorted({*trace.signals, signal}))}]"
            )
    return found


def export_predictors(
    families: Sequence[PredictorStack], trace: Trace, *, int8: bool = False
) -> tuple[dict[str, Predictor], dict[str, Parity]]:
    """Returns the exported predictors and their agreement with torch on held-out requests.

    With `int8`, the weights are rounded to eight bits after the comparison.
    """
    made: dict[str, Predictor] = {}
    agreement: dict[str, Parity] = {}
    for family in families:
        own = dict(family.export(trace.spec))
        batches = TraceBatches(
            trace,
            TraceSubset.HELD_OUT,
            batch_size=PARITY_TOKENS,
            needs=replace(family.needs, decays=()),
        )
        agreement |= check_parity(family, own, batches, top_k=trace.spec.top_k)
        # Made anew: those that were asked just now remember it.
        again = dict(family.export(trace.spec))
        made |= {kind: quantise(one) for kind, one in again.items()} if int8 else again
    return made, agreement


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
    """Write a zoo entry for each predictor, with its held-out metrics; return their folders."""
    written = {}
    for name, predictor in predictors.items():
        table = results[name]
        means = {key: table[f"mean_{key}"] for key in ("accuracy", "fetch_rate", "good_pred")}
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
                    "worst_layer_accuracy": table["worst_layer_accuracy"],
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
