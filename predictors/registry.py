"""Every kind of predictor, in one frozen table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from predictors.base import Predictor
from predictors.correlation import Correlation
from predictors.dependency import Dependency
from predictors.eam.request import EamRequest
from predictors.eam.sequence import EamSequence
from predictors.errors import PredictorError, unknown
from predictors.expert_map.predictor import ExpertMap
from predictors.learned import Learned, Mlp, Stride
from predictors.popularity import Popularity
from predictors.pre_attention import PreAttention
from predictors.residual import Residual
from predictors.reuse.forecaster import Reuse
from predictors.skip import Skip
from predictors.spec import ModelSpec
from predictors.token import Token

CLASSES: tuple[type[Predictor], ...] = (
    Mlp,
    Stride,
    PreAttention,
    Residual,
    Skip,
    Token,
    Popularity,
    Dependency,
    EamSequence,
    EamRequest,
    ExpertMap,
    Correlation,
)
KEEPERS: Mapping[str, type[Predictor]] = MappingProxyType({Reuse.kind: Reuse})
"""Those that forecast what to keep, not what the step needs: for eviction, not for prefetching."""
KINDS: Mapping[str, type[Predictor]] = MappingProxyType({one.kind: one for one in CLASSES})
PLAIN: Mapping[str, type[Learned]] = MappingProxyType(
    {one.kind: one for one in (Mlp, Stride, PreAttention)}
)
"""The papers' networks: two layers from one state to one layer's experts."""
LEARNED: Mapping[str, type[Predictor]] = MappingProxyType({**PLAIN, Residual.kind: Residual})
"""Those that `train/` fits with gradient descent, by kind."""


def predictor_class(kind: str) -> type[Predictor]:
    """PredictorError with the choices and the closest of them when there is no such kind."""
    if kind not in KINDS:
        raise PredictorError(unknown("predictor", kind, KINDS))
    return KINDS[kind]


def from_files(
    kind: str, spec: ModelSpec, *, files: Mapping[str, bytes], options: Mapping[str, Any]
) -> Predictor:
    """A predictor from the payload of a zoo entry, whose bytes were checked by digest before."""
    cls = KEEPERS.get(kind) or predictor_class(kind)
    return cls.from_files(spec, files, options)
