"""The table of all kinds of predictors, and a training run's folder, which stands for several."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

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
from predictors.errors import MoecastError, PredictorError, describe_error, unknown
from predictors.expert_map import ExpertMapPredictor
from predictors.files import path_exists
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
UNFIT = (ArithmeticError, AssertionError, LookupError, MemoryError, TypeError, ValueError)
"""Errors that predictors and NumPy raise for arrays and options that do not belong together."""
ENTRIES = "entries"
"""Folder of a run's entries, each in a folder with the name of its kind."""
Chosen = TypeVar("Chosen", bound=str | Path)
RUN_RECORD = "run.json"
MANIFEST = "manifest.json"


def predictor_class(kind: str) -> type[Predictor]:
    """Returns a kind's class; PredictorError has the choices and the closest one."""
    if kind not in KINDS:
        raise PredictorError(unknown("predictor", kind, KINDS))
    return KINDS[kind]


def load_from_files(
    kind: str, spec: ModelSpec, *, files: Mapping[str, bytes], options: Mapping[str, Any]
) -> Predictor:
    """Loads a predictor from the payload of a zoo entry, whose digests were checked before.

    Raises:
        MoecastError: It has other files or options than its kind, or none that fit one another.
    """
    cls = REUSE_PREDICTORS.get(kind) or predictor_class(kind)
    try:
        return cls.from_files(spec, files, options)
    except MoecastError:
        raise
    except UNFIT as error:
        raise PredictorError(
            f"no {kind} predictor can be made of these files and options ({describe_error(error)})"
        ) from error


def find_run_entries(folder: Path) -> Path | None:
    """Returns the folder of a run's entries; None if `folder` is not that of a training run.

    Raises PredictorError if it is a run's and has no entries.
    """
    if not path_exists(folder):
        return None
    entries = folder / ENTRIES
    if any(entries.glob(f"*/{MANIFEST}")):
        return entries
    if entries.is_dir() or (folder / RUN_RECORD).is_file():
        raise PredictorError(
            f"{folder} is a run without entries: `moecast train` writes them at the end of a run. "
            f"Repeat its command with {shlex.quote(f'run_dir={folder}')} to complete it"
        )
    return None


def separate_run(chosen: Chosen | None, entries: Path | None) -> tuple[Chosen | None, Path | None]:
    """Returns predictor and folder of entries, where a run's folder may stand for either.

    A run as the predictor means its entries of the kinds that each system names. A kind is one even
    if a folder has its name.
    """
    if chosen is not None and str(chosen) not in {*KINDS, *REUSE_PREDICTORS}:
        found = find_run_entries(Path(chosen))
        if found is not None:
            return None, found
    if entries is not None:
        entries = find_run_entries(entries) or entries
    return chosen, entries
