"""Predictors made of arrays, which are stored as one safetensors file."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from predictors.base import Predictor, check_options
from predictors.errors import PredictorError
from predictors.spec import ModelSpec

WEIGHTS = "weights.safetensors"
Shapes = Mapping[str, tuple[int | None, ...]]
"""Name of each array to its shape; None stands for any size."""


class TensorPredictor(Predictor):
    """A predictor whose constructor takes the arrays of its file, then its options."""

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:
        """Returns the shapes of the arrays, in the order of the constructor's arguments."""
        raise NotImplementedError

    @classmethod
    def empty(cls, spec: ModelSpec, **options: Any) -> Self:
        """Makes a predictor without observations: a cold start."""
        shapes = cls.shapes(spec).values()
        zeros = (np.zeros([size or 0 for size in shape], np.float32) for shape in shapes)
        return cls(spec, *zeros, **options)

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        shapes = cls.shapes(spec)
        arrays = read_tensors(files, shapes, kind=cls.kind)
        return cls(spec, *(arrays[name] for name in shapes), **check_options(cls, options))


def write_tensors(tensors: Mapping[str, NDArray]) -> dict[str, bytes]:
    return {WEIGHTS: save({name: np.ascontiguousarray(array) for name, array in tensors.items()})}


def read_tensors(files: Mapping[str, bytes], shapes: Shapes, *, kind: str) -> dict[str, NDArray]:
    """Reads the arrays of a payload.

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
