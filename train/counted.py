"""Every kind that is counted, copied or collected, not learned, by its name in the results."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.correlation import CorrelationPredictor
from predictors.dependency import DependencyPredictor
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import EamSequencePredictor
from predictors.expert_map.predictor import ExpertMapPredictor
from predictors.popularity import PopularityPredictor
from predictors.skip import SkipPredictor
from predictors.token import TokenPredictor
from runtime.config import ModelConfig
from train.baselines import fit_popularity, fit_token, make_skip
from train.stateful import fit_correlation, fit_eam_request, fit_eam_sequence, fit_expert_map

HORIZONS = (1, 2, 3)
"""Layers ahead at which skip is made, unless it is told one."""


def make_dependency(trace: Trace, **_options: Any) -> DependencyPredictor:
    """It is made of nothing but the model's shape."""
    return DependencyPredictor(trace.spec)


FITS: Mapping[str, Callable[..., Predictor]] = MappingProxyType(
    {
        TokenPredictor.kind: fit_token,
        PopularityPredictor.kind: fit_popularity,
        DependencyPredictor.kind: make_dependency,
        EamSequencePredictor.kind: fit_eam_sequence,
        EamRequestPredictor.kind: fit_eam_request,
        ExpertMapPredictor.kind: fit_expert_map,
        CorrelationPredictor.kind: fit_correlation,
    }
)
"""From a trace's training requests, by kind; skip, which is copied from the model, apart."""


def counted(
    trace: Trace,
    model: ModelConfig,
    kinds: Iterable[str],
    *,
    options: Mapping[str, Mapping[str, Any]],
    seed: int,
) -> dict[str, Predictor]:
    """Those of the kinds that are not learned; `options` by kind, as `train.kinds.options_of`."""
    made: dict[str, Predictor] = {}
    for kind in kinds:
        own = dict(options.get(kind, {}))
        if kind == SkipPredictor.kind:
            horizons = (int(own["horizon"]),) if own else HORIZONS
            for one in make_skip(model, trace.spec, horizons=horizons):
                made[kind if one.horizon == 1 else f"{kind}-{one.horizon}"] = one
        elif kind in FITS:
            if kind == EamSequencePredictor.kind:
                own = {"seed": seed, **own}
            made[kind] = FITS[kind](trace, **own)
    return made
