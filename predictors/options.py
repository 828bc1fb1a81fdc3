"""Options of a predictor: the keyword arguments of its constructor, as plain JSON values."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from predictors.errors import PredictorError, unknown

if TYPE_CHECKING:
    from predictors.base import Predictor


def known_options(cls: "type[Predictor]") -> set[str]:
    """Names of the options of a kind."""
    parameters = inspect.signature(cls).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def checked_options(cls: "type[Predictor]", options: Mapping[str, Any]) -> dict[str, Any]:
    """The options; PredictorError with the choices and the closest when the kind has not one."""
    known = known_options(cls)
    for name in options:
        if name not in known:
            raise PredictorError(f"{cls.kind}: {unknown('option', name, known)}")
    return dict(options)
