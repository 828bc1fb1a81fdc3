"""Stages of `moecast train`: networks, export, parity, zoo entries; finished and published ones."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from collect.traces import Trace
from predictors.base import Floats, Forecasts, Predictor, Signal
from predictors.metrics import DEFINITIONS
from predictors.registry import FEED_FORWARD
from predictors.table import Table, decimals, format_or_dash
from runtime.tools.report.provenance import RUN_FILE
from train.config import TrainConfig
from train.data import Batch, TraceBatches, TraceSubset
from train.errors import ParityError, TrainError
from train.export import quantise
from train.fit import FitSettings
from train.networks import PlainStack, network_specs
from train.nonlearned import RouterWeights
from train.predictor_stack import PredictorStack, ReferenceScores
from train.report.forecasts import draw_accuracy_figure
from train.residual import ResidualStack
from train.scoring import EvalContext
from zoo.catalog import Zoo
from zoo.entry import MANIFEST, ZooEntry, write_entry
from zoo.manifest import Scalar, name_entry

HORIZONS = 3
"""Layers that one state of `residual` is good for."""

PARITY_TOKENS = 1_024
"""Tokens compared at once, each as a separate request."""


LEAST_PARITY = 0.999
"""Share of held-out tokens on which torch and the export must choose the same top_k set."""


@dataclass
class Parity:
    """Agreement of the exported networks with torch on held-out tokens."""

    tokens: int = 0
    """(token, network) pairs compared."""
    same: int = 0
    """Those with the same top_k set."""
    max_abs_difference: float = 0.0
    """Largest difference of scores, which lie in [0, 1]."""

    def add(self, expected_BE: Floats, found_BE: Floats, top_k: int) -> None:
        pair = (expected_BE, found_BE)
        best = [np.sort(np.argsort(-scores, kind="stable")[:, :top_k]) for scores in pair]
        self.same += int((best[0] == best[1]).all(axis=1).sum())
        self.tokens += len(expected_BE)
        largest = float(np.abs(expected_BE - found_BE).max(initial=0.0))
        self.max_abs_difference = max(self.max_abs_difference, largest)

    @property
    def same_top_k(self) -> float:
        return self.same / self.tokens

    def as_dict(self) -> dict[str, Scalar]:
        names = ("tokens", "same_top_k", "max_abs_difference")
        return {name: getattr(self, name) for name in names}


def check_parity(
    family: PredictorStack, exported: Mapping[str, Predictor], batches: Iterable[Batch]
) -> dict[str, Parity]:
    """Compare the scores of torch and the export, each token as the first of a separate request.

    Raises ParityError when a kind's top_k sets agree on less than `LEAST_PARITY` of the tokens.
    """
    found = {kind: Parity() for kind in exported}
    first_request = 0
    for batch in batches:
        num_tokens = batch.chosen_LBK.size(1)
        requests = np.arange(first_request, first_request + num_tokens)
        first_request += num_tokens
        for predictor in exported.values():
            predictor.begin_step(np.zeros(num_tokens, np.int64), requests)
        for answer in family.answers(batch):
            predictor = exported[answer.kind]
            forecasts = answer_event(predictor, answer, batch)
            scores_TE = {forecast.layer: forecast.scores_TE for forecast in forecasts}
            for target, scores_BE in answer.scores_BE.items():
                found[answer.kind].add(scores_BE, scores_TE[target], predictor.spec.top_k)
    for kind, one in found.items():
        if one.same_top_k < LEAST_PARITY:
            raise ParityError(
                f"the exported {kind} networks choose torch's top {exported[kind].spec.top_k} on "
                f"{one.same_top_k:.4%} of {one.tokens:,} tokens; at least {LEAST_PARITY:.1%} must"
            )
    return found


def answer_event(predictor: Predictor, answer: ReferenceScores, batch: Batch) -> Forecasts:
    """Returns the predictor's forecasts at the event of the reference scores."""
    hidden = batch.states[answer.signal][answer.source].cpu().numpy()
    if answer.signal is Signal.LAYER_INPUT:
        return predictor.layer_input(answer.source, hidden)
    forecasts = predictor.gate_input(answer.source, hidden)
    if answer.logits_BE is None:
        return forecasts
    chosen_BK = batch.chosen_LBK[answer.source].cpu().numpy()
    return predictor.routed(answer.source, chosen_BK, answer.logits_BE)


def make_stacks(
    trace: Trace, routers: RouterWeights, settings: FitSettings
) -> list[PredictorStack]:
    """Return the untrained networks of the settings' kinds; the same ones for the same seed.

    Raises TrainError when the model's routers cannot be copied.
    """
    from lightning.pytorch import seed_everything

    spec = trace.spec
    seed_everything(settings.seed, verbose=False)
    stacks: list[PredictorStack] = []
    plain = [kind for kind in FEED_FORWARD if kind in settings.kinds]
    if plain:
        networks = network_specs(spec, plain)
        stacks.append(PlainStack(spec, networks, width=settings.width, loss=settings.loss))
    if "residual" in settings.kinds:
        stacks.append(ResidualStack(spec, *routers.weights, horizons=HORIZONS))
    return stacks


def export_predictors(
    families: Sequence[PredictorStack], trace: Trace, *, int8: bool = False
) -> tuple[dict[str, Predictor], dict[str, dict[str, Scalar]]]:
    """Returns the exported predictors and their agreement with torch on held-out requests.

    With `int8`, the weights are rounded to eight bits after the comparison.
    """
    made: dict[str, Predictor] = {}
    agreement: dict[str, dict[str, Scalar]] = {}
    for family in families:
        own = family.export(trace.spec)
        batches = TraceBatches(
            trace,
            TraceSubset.HELD_OUT,
            batch_size=PARITY_TOKENS,
            needs=replace(family.needs, decays=()),
        )
        for kind, parity in check_parity(family, own, batches).items():
            agreement[kind] = parity.as_dict()
            # Anew: the compared predictors have state from the comparison.
            made[kind] = quantise(own[kind]) if int8 else own[kind].renewed()
    return made, agreement


def describe_kinds(table: Mapping[str, Any]) -> str:
    """Return the card's table of the accuracy on other kinds of prompts; empty without any."""
    keys = ("mean_accuracy", "worst_layer_accuracy", "tokens")
    rows = [(kind, *(own[key] for key in keys)) for kind, own in table["other_kinds"].items()]
    if not rows:
        return ""
    lines = Table.of(["prompts", "accuracy", "worst layer", "tokens"], rows).markdown()
    return "\n".join(["## Accuracy by kind of prompts", "", *lines])


def write_entries(
    config: TrainConfig,
    context: EvalContext,
    predictors: Mapping[str, Predictor],
    results: Mapping[str, dict[str, Any]],
    parities: Mapping[str, Mapping[str, Scalar]],
    training: Mapping[str, Mapping[str, Any] | None],
) -> dict[str, Path]:
    """Write a zoo entry for each predictor, with its held-out metrics; return their folders."""
    written, setting = {}, context.setting
    for name, predictor in predictors.items():
        table = results[name]
        names = ("accuracy", "fetch_rate", "good_pred", "promoe_good_pred")
        means = {key: table[f"mean_{key}"] for key in names}
        written[name] = config.folder / "entries" / name
        write_entry(
            written[name],
            predictor,
            name=name_entry(config.model.name, name),
            metrics={
                "held_out": {**means, "worst_layer_accuracy": table["worst_layer_accuracy"]},
                "setting": setting,
                "definitions": DEFINITIONS,
                "layers": table,
            },
            trace_digest=context.trace.digest,
            parity=parities.get(name, {}),
            card_extra=f"fetch_rate and good_pred: {setting}, in which a token took "
            f"{format_or_dash(table['mean_tpot_ms'], decimals)} ms.\n\n{describe_kinds(table)}",
            training=training[name],
            figure=draw_accuracy_figure(name, results) if config.figures else None,
        )
    return written


def read_finished(config: TrainConfig, trace: Trace) -> dict[str, Any] | None:
    """Return the results of the run folder if they are complete, and of this trace.

    The command line puts results of another configuration aside; without run.json, their
    configuration is not known. None with `overwrite`, too.
    """
    path = config.folder / "results.json"
    if config.overwrite or not path.is_file() or not (config.folder / RUN_FILE).is_file():
        return None
    results: dict[str, Any] = json.loads(path.read_text())
    manifests = [config.folder / "entries" / name / MANIFEST for name in results["entries"]]
    if results["trace"]["digest"] != trace.digest or not all(map(Path.is_file, manifests)):
        return None
    sys.stderr.write(
        f"this training is finished: {path} has what it found, {config.folder / 'entries'} the "
        "predictors; overwrite=true trains them anew\n"
    )
    return results


def open_published(config: TrainConfig, trace: Trace, *kinds: str) -> dict[str, ZooEntry]:
    """Return the model's entries in the configured zoo by their predictors, if there is a zoo.

    Raises TrainError if one of `kinds` is not there, or nothing is, and if an entry has learned
    from another trace: requests that are held out of this one may be among those.
    """
    found: dict[str, ZooEntry] = {}
    if config.zoo is None:
        return found
    for name, entry in Zoo.at(config.zoo).entries().items():
        predictor = name.rpartition("/")[2]
        if name != name_entry(config.model.name, predictor):
            continue
        if entry.manifest.trace_digest != trace.digest:
            raise TrainError(
                f"{name} in zoo={config.zoo} was trained on another trace than {trace.where}, "
                f"{entry.manifest.trace_digest}: name that; `moecast zoo score` takes any"
            )
        found[predictor] = entry
    if not found or not found.keys() >= set(kinds):
        wanted = ", ".join(kinds) or "entry"
        raise TrainError(f"zoo={config.zoo} has no {wanted} of model={config.model.name}")
    return found
