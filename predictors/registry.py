"""Every kind of predictor, in one frozen table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from predictors.base import Predictor
from predictors.correlation import CorrelationPredictor
from predictors.dependency import DependencyPredictor
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import EamSequencePredictor
from predictors.errors import PredictorError, unknown
from predictors.expert_map.predictor import ExpertMapPredictor
from predictors.learned import (
    LearnedPredictor,
    MlpPredictor,
    PreAttentionPredictor,
    StridePredictor,
)
from predictors.popularity import PopularityPredictor
from predictors.residual import ResidualPredictor
from predictors.reuse.forecaster import ReusePredictor
from predictors.skip import SkipPredictor
from predictors.spec import ModelSpec
from predictors.token import TokenPredictor

CLASSES: tuple[type[Predictor], ...] = (
    MlpPredictor,
    StridePredictor,
    PreAttentionPredictor,
    ResidualPredictor,
    SkipPredictor,
    TokenPredictor,
    PopularityPredictor,
    DependencyPredictor,
    EamSequencePredictor,
    EamRequestPredictor,
    ExpertMapPredictor,
    CorrelationPredictor,
)
REUSE_PREDICTORS: Mapping[str, type[Predictor]] = MappingProxyType(
    {ReusePredictor.kind: ReusePredictor}
)
"""Those that forecast what to keep, not what the step needs: for eviction, not for prefetching."""
KINDS: Mapping[str, type[Predictor]] = MappingProxyType({one.kind: one for one in CLASSES})
FEED_FORWARD: Mapping[str, type[LearnedPredictor]] = MappingProxyType(
    {one.kind: one for one in (MlpPredictor, StridePredictor, PreAttentionPredictor)}
)
"""The papers' networks: two layers from one state to one layer's experts."""
LEARNED: Mapping[str, type[Predictor]] = MappingProxyType(
    {**FEED_FORWARD, ResidualPredictor.kind: ResidualPredictor}
)
"""Those that `train/` fits with gradient descent, by kind."""


def predictor_class(kind: str) -> type[Predictor]:
    """PredictorError with the choices and the closest of them when there is no such kind."""
    if kind not in KINDS:
        raise PredictorError(unknown("predictor", kind, KINDS))
    return KINDS[kind]


def load_from_files(
    kind: str, spec: ModelSpec, *, files: Mapping[str, bytes], options: Mapping[str, Any]
) -> Predictor:
    """A predictor from the payload of a zoo entry, whose bytes were checked by digest before."""
    cls = REUSE_PREDICTORS.get(kind) or predictor_class(kind)
    return cls.from_files(spec, files, options)
