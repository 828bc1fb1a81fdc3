"""The table of all kinds of predictors."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from predictors.base import Predictor
from predictors.baselines import (
    DependencyPredictor,
    PopularityPredictor,
    SkipPredictor,
    TokenPredictor,
)
from predictors.correlation import CorrelationPredictor
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import EamSequencePredictor
from predictors.errors import PredictorError, unknown
from predictors.expert_map import ExpertMapPredictor
from predictors.learned import (
    LearnedPredictor,
    MlpPredictor,
    PreAttentionPredictor,
    StridePredictor,
)
from predictors.residual import ResidualPredictor
from predictors.reuse import ReusePredictor
from predictors.spec import ModelSpec

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
    {cls.kind: cls for cls in (ReusePredictor,)}
)
"""Predictors that score experts for eviction, not for prefetching."""
KINDS: Mapping[str, type[Predictor]] = MappingProxyType({cls.kind: cls for cls in CLASSES})
FEED_FORWARD: Mapping[str, type[LearnedPredictor]] = MappingProxyType(
    {cls.kind: cls for cls in (MlpPredictor, StridePredictor, PreAttentionPredictor)}
)
"""Networks of two layers, from one state to one layer's experts (ProMoE, section 4.3)."""
LEARNED: Mapping[str, type[Predictor]] = MappingProxyType(
    {**FEED_FORWARD, ResidualPredictor.kind: ResidualPredictor}
)
"""Predictors that `train/` fits with gradient descent."""


def predictor_class(kind: str) -> type[Predictor]:
    """Returns a kind's class; PredictorError has the choices and the closest one."""
    if kind not in KINDS:
        raise PredictorError(unknown("predictor", kind, KINDS))
    return KINDS[kind]


def load_from_files(
    kind: str, spec: ModelSpec, *, files: Mapping[str, bytes], options: Mapping[str, Any]
) -> Predictor:
    """Loads a predictor from the payload of a zoo entry, whose digests were checked before."""
    cls = REUSE_PREDICTORS.get(kind) or predictor_class(kind)
    return cls.from_files(spec, files, options)
