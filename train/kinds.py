"""The kinds that `predictor=` selects, their options and the signals that they need."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from collect.traces import Trace, TraceSignal
from collect.traces.layout import PROBES
from predictors.base import Signal, check_options
from predictors.baselines import SkipPredictor, TokenPredictor
from predictors.config import ALL, PredictorConfig
from predictors.errors import PredictorError
from predictors.expert_map import DISTANCE, ExpertMapPredictor
from predictors.registry import FEED_FORWARD, KINDS, LEARNED, REUSE_PREDICTORS, predictor_class
from train.errors import TrainError

BASELINES = ("skip", "token", "popularity")
"""Cheap kinds that are always fitted for comparison."""

COMPARED = ("mlp", "stride")
"""The published learned predictors, trained with any learned one in one pass over the same columns.
The others take several times the work and twice the trace: they are trained only if selected."""

WITH_REUSE = (ALL, "residual")
"""Selections that train a predictor for eviction as well: the system `moecast` prefetches what
`residual` forecasts and evicts by `reuse`."""

RECORDED: Mapping[Signal, TraceSignal | None] = MappingProxyType(
    {Signal.TOKENS: None, **{probe: signal for signal, probe in PROBES.items()}}
)
"""Trace column of each signal of predictors; None: every trace has it."""


def list_compared_kinds(kind: str) -> tuple[str, ...]:
    """Returns the selected kind, followed by those that it is compared with.

    Raises:
        PredictorError: there is no such kind; the message lists the choices.
    """
    if kind in REUSE_PREDICTORS:
        raise PredictorError(f"{kind} is for eviction: moecast train reuse predictor={kind}")
    if kind == ALL:
        return tuple(KINDS)
    compared = COMPARED if predictor_class(kind).kind in LEARNED else ()
    return tuple(dict.fromkeys((kind, *compared, *BASELINES)))


def collect_signals(kinds: Iterable[str]) -> tuple[TraceSignal, ...]:
    """Returns the signals that a trace must have to fit and score these kinds."""
    needed = {RECORDED[signal] for kind in kinds for signal in KINDS[kind].signals}
    needed |= {TraceSignal.EXPERTS, TraceSignal.WEIGHTS}
    return tuple(signal for signal in TraceSignal if signal in needed)


def leave_out_kinds(config: PredictorConfig, kinds: Iterable[str], trace: Trace) -> dict[str, str]:
    """Returns the kinds that this trace cannot fit or score, each with the reason.

    Raises:
        TrainError: the selected kind is one of them.
    """
    spec = trace.spec
    reach = {kind: cls.horizon for kind, cls in FEED_FORWARD.items()}
    reach[ExpertMapPredictor.kind] = int(config.options.get("distance", DISTANCE))
    reach[SkipPredictor.kind] = int(config.options.get("horizon", 1))
    reasons = {}
    for kind in kinds:
        if not set(collect_signals([kind])) <= {TraceSignal.WEIGHTS, *trace.signals}:
            reasons[kind] = "the trace lacks its signals"
        elif kind == TokenPredictor.kind and not trace.has_tokens:
            reasons[kind] = (
                "it needs token ids, which the trace does not have (a server records none)"
            )
        elif reach.get(kind, 0) >= spec.num_layers:
            reasons[kind] = (
                f"it forecasts {reach[kind]} layers ahead, but {spec.model_id} has "
                f"{spec.num_layers} with experts"
            )
    if reason := reasons.get(config.kind):
        raise TrainError(
            f"predictor={config.kind}: {reason}. Choose another predictor or another trace"
        )
    return reasons


def options_by_kind(config: PredictorConfig) -> dict[str, dict[str, Any]]:
    """Return options by kind; raises as `predictors.base.check_options`, and for a learned kind."""
    if not config.options:
        return {}
    if config.kind == ALL:
        raise PredictorError(
            "predictor.options belong to one kind: predictor=KIND predictor.options={...}"
        )
    if config.kind in LEARNED:
        raise PredictorError(
            f"predictor.options: training {config.kind} does not use {', '.join(config.options)}: "
            "leave them out; `system.predictor_options` overrides an entry's where it is served"
        )
    return {config.kind: check_options(predictor_class(config.kind), config.options)}
