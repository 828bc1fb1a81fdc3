"""Every kind that is counted, copied or collected, not learned, by its name in the results."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.correlation import Correlation
from predictors.dependency import Dependency
from predictors.eam.request import EamRequest
from predictors.eam.sequence import EamSequence
from predictors.expert_map.predictor import ExpertMap
from predictors.popularity import Popularity
from predictors.skip import Skip
from predictors.token import Token
from runtime.config import ModelConfig
from train.baselines import fit_popularity, fit_token, make_skip
from train.stateful import fit_correlation, fit_eam_request, fit_eam_sequence, fit_expert_map

HORIZONS = (1, 2, 3)
"""Layers ahead at which skip is made, unless it is told one."""


def make_dependency(trace: Trace, **_options: Any) -> Dependency:
    """It is made of nothing but the model's shape."""
    return Dependency(trace.spec)


FITS: Mapping[str, Callable[..., Predictor]] = MappingProxyType(
    {
        Token.kind: fit_token,
        Popularity.kind: fit_popularity,
        Dependency.kind: make_dependency,
        EamSequence.kind: fit_eam_sequence,
        EamRequest.kind: fit_eam_request,
        ExpertMap.kind: fit_expert_map,
        Correlation.kind: fit_correlation,
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
        if kind == Skip.kind:
            horizons = (int(own["horizon"]),) if own else HORIZONS
            for one in make_skip(model, trace.spec, horizons=horizons):
                made[kind if one.horizon == 1 else f"{kind}-{one.horizon}"] = one
        elif kind in FITS:
            if kind == EamSequence.kind:
                own = {"seed": seed, **own}
            made[kind] = FITS[kind](trace, **own)
    return made
