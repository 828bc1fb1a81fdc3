"""`moecast zoo score`: an entry on prompts of the user's, with the figures of its card."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from collect.traces import Trace
from predictors.errors import NegativeResult
from predictors.registry import REUSE_PREDICTORS
from runtime.config import ModelConfig
from runtime.presets import describe_choice
from train.accuracy import RequestAccuracy, accuracy_table, score_layers
from train.config import ScoreConfig
from train.errors import TrainError
from train.eviction_eval import compare_policies, decode_figures
from train.find_trace import find_differences, find_trace
from train.kinds import collect_signals
from train.replay import describe_machines, first_tokens, measure_fetching
from train.reuse_training import SIGNALS as REUSE_SIGNALS
from zoo.commands import print_line
from zoo.commands.list import comparison_table
from zoo.comparison import pair_figures
from zoo.entry import ZooEntry
from zoo.load import find_entry, load_predictor

STANDARD_ERRORS = 2.0
"""A drop within this many standard errors of the accuracy may be chance."""


class DoesNotFit(NegativeResult):
    """The entry is less accurate on these prompts than on those of its card."""


@dataclass(frozen=True)
class Verdict:
    """Whether an accuracy is what the card says, within sampling error and tolerance."""

    on_card: float
    here: float
    standard_error: float | None
    """None: too few requests to know."""
    max_drop: float
    name: str = "accuracy"

    @property
    def drop(self) -> float:
        return self.on_card - self.here

    @property
    def allowed(self) -> float:
        return self.max_drop + STANDARD_ERRORS * (self.standard_error or 0.0)

    @property
    def fits(self) -> bool:
        return self.drop <= self.allowed

    def describe_drop(self) -> str:
        return (
            f"{self.name} {self.here:.3f}, {self.drop:.3f} below its card, of which "
            f"{self.allowed:.3f} would be chance and tolerance"
        )


def score(config: ScoreConfig) -> dict[str, Any]:
    """Score an entry and print its figures and the card's.

    Raises:
        DoesNotFit: the accuracy, of all layers or of the worst one, is lower than on the card by
            more than chance and `max_drop`.
        TrainError, TraceError, PromptError: no trace to score on.
        ZooError: no such entry, or one of another model than the trace's.
    """
    entry = find_entry(config.name)
    if config.trace is None:
        require_own_model(entry, config.model)
    is_reuse = entry.manifest.kind in REUSE_PREDICTORS
    signals = REUSE_SIGNALS if is_reuse else collect_signals((entry.manifest.kind,))
    trace = find_trace(config, signals)
    split = "held_out" if trace.digest == entry.manifest.trace_digest else None
    verdicts: list[Verdict] = []
    if is_reuse:
        figures = score_reuse(config, trace, split)
    else:
        figures, verdicts = score_forecasts(config, entry, trace, split)
    results = {
        "entry": f"{entry.manifest.name}@{entry.manifest.digest[:12]}",
        "trace": {"digest": trace.digest, "where": trace.where, "split": split},
        "card": dict(entry.manifest.metrics),
        "here": figures,
        "standard_error": {verdict.name: verdict.standard_error for verdict in verdicts},
        "fits": all(verdict.fits for verdict in verdicts) if verdicts else None,
    }
    if config.json:
        print_line(json.dumps(results, indent=2))
    else:
        print_figures(results, trace, verdicts)
    if drops := [verdict.describe_drop() for verdict in verdicts if not verdict.fits]:
        command = f"moecast train {describe_choice(config.model)}"
        raise DoesNotFit(
            f"{results['entry']} does not fit these prompts: {'; '.join(drops)}. To train on them: "
            f"{command} predictor={entry.manifest.kind} trace={shlex.quote(trace.where)}"
        )
    return results


def require_own_model(entry: ZooEntry, model: ModelConfig) -> None:
    """Raise TrainError if the prompts would be recorded from another model than the entry's."""
    if wrong := find_differences(entry.manifest.spec, model):
        listed = ", ".join(f"{key} {own}, not {other}" for key, (own, other) in wrong.items())
        raise TrainError(
            f"{entry.manifest.name} was made for another model than model={model.name} ({listed}): "
            "name its model (model=), or a trace of a quantisation of it (trace=PATH)"
        )


def score_forecasts(
    config: ScoreConfig, entry: ZooEntry, trace: Trace, split: str | None
) -> tuple[dict[str, float | None], list[Verdict]]:
    """Return the figures of the card, by its names, and verdicts on the accuracies that it has."""
    predictor = load_predictor(config.name, spec=trace.spec)
    by_request = RequestAccuracy(len(trace.request_table), num_layers=trace.spec.num_layers)
    layers = score_layers(predictor.for_all_tokens(), trace, split, by_request=by_request)
    table = accuracy_table(layers)
    least = table["worst_layer_accuracy"]
    worst = None if least is None else table["accuracy"].index(least)
    (hardware,) = describe_machines([config.hardware], config.shape, config.model)
    fetched = measure_fetching(
        first_tokens(trace.steps(split), config.replay_tokens),
        predictor.renewed(),
        system=config.system,
        hardware=hardware,
        budget=config.budget,
    )
    figures = {
        "accuracy": table["mean_accuracy"],
        "worst_layer_accuracy": least,
        "fetch_rate": fetched["mean_fetch_rate"],
        "good_pred": fetched["mean_good_pred"],
        "promoe_good_pred": fetched["mean_promoe_good_pred"],
    }
    verdicts = []
    for metric, layer in (("accuracy", None), ("worst_layer_accuracy", worst)):
        on_card, here = entry.manifest.metrics.get(metric), figures[metric]
        if isinstance(on_card, float) and here is not None:
            error = by_request.standard_error(layer)
            name = "accuracy" if layer is None else f"accuracy of layer {layer} (the worst)"
            verdicts.append(Verdict(on_card, here, error, max_drop=config.max_drop, name=name))
    return figures, verdicts


def score_reuse(config: ScoreConfig, trace: Trace, split: str | None) -> dict[str, float | None]:
    """Return hit rates, and the share of the gap between LRU and Belady that `reuse` closes.

    Hit rates depend on the prompts as much as on the predictor, so there is no verdict on them.
    """
    predictor = load_predictor(config.name, spec=trace.spec)
    tables = compare_policies(trace, [predictor], num_tokens=config.replay_tokens, split=split)
    return decode_figures(tables, predictor.kind)


def print_figures(results: dict[str, Any], trace: Trace, verdicts: Sequence[Verdict]) -> None:
    which = "held-out requests of its own trace" if results["trace"]["split"] else "all requests"
    rows = len(trace.rows(results["trace"]["split"]))
    print_line(f"{results['entry']} on {which}, {rows:,} tokens of {trace.where}")
    card, here = results["card"], results["here"]
    pairs = pair_figures({name: card.get(name) for name in here}, here)
    comparison_table("", pairs, names=("card", "here")).print(Console())
    if not verdicts:
        print_line("no verdict: the card has no accuracy, and hit rates depend on the prompts too")
    elif results["fits"]:
        allowed = ", ".join(f"{one.name.rstrip(',')} by {one.allowed:.3f}" for one in verdicts)
        print_line(f"it fits: not below its card by more than chance and tolerance ({allowed})")
