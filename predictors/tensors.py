"""The safetensors file of a predictor's payload, checked against expected shapes."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from predictors.errors import PredictorError

WEIGHTS = "weights.safetensors"


def write_tensors(tensors: Mapping[str, NDArray]) -> dict[str, bytes]:
    """Returns the payload with these arrays."""
    return {WEIGHTS: save({name: np.ascontiguousarray(array) for name, array in tensors.items()})}


def read_tensors(
    files: Mapping[str, bytes], shapes: Mapping[str, tuple[int | None, ...]], *, kind: str
) -> dict[str, NDArray]:
    """Reads the arrays of a payload; None in a shape stands for any size.

    Raises PredictorError, with both shapes, if one is missing or has another shape.
    """
    if WEIGHTS not in files:
        raise PredictorError(f"a {kind} predictor needs a file {WEIGHTS}; got {sorted(files)}")
    try:
        arrays = load(files[WEIGHTS])
    except SafetensorError as error:
        raise PredictorError(f"{WEIGHTS} of the {kind} predictor is damaged: {error}") from error
    for name, expected in shapes.items():
        if name not in arrays:
            raise PredictorError(f"{WEIGHTS} of the {kind} predictor has no tensor {name!r}")
        got = arrays[name].shape
        if len(got) != len(expected) or any(
            want not in (None, size) for want, size in zip(expected, got, strict=True)
        ):
            raise PredictorError(
                f"{name} of the {kind} predictor has the shape {got}, expected {expected} "
                "(None: any); it was made for another model"
            )
    return arrays
