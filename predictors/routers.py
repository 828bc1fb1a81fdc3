"""Samples of a model's routers: they show whether a checkpoint is a quantisation of another.

Formats of four to eight bits leave routers as they are, or round them to another float. So two
checkpoints whose routers agree within that rounding choose experts from nearly the same states.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SAMPLES = 16
"""Weights of each layer, evenly spaced over the matrix: any training moves most of them."""
ROUNDING = 2.0**-8
"""Twice the relative error of bfloat16: either side may have been rounded to it."""
SMALLEST = 2.0**-24
"""The smallest number of float16; below its normal numbers the error is half of that."""

RouterSamples = tuple[str, ...]
"""For each layer, `SAMPLES` weights as little-endian float32, in hexadecimal digits."""


def sample_positions(num_weights: int) -> list[int]:
    """Return the positions of a layer's samples in its flattened router."""
    return [i * (num_weights - 1) // (SAMPLES - 1) for i in range(SAMPLES)]


def encode_samples(samples_LS: Sequence[npt.NDArray[np.float32]]) -> RouterSamples:
    """Return the samples of all layers, `SAMPLES` of each."""
    return tuple(np.asarray(samples_S, dtype="<f4").tobytes().hex() for samples_S in samples_LS)


def find_router_difference(ours: RouterSamples, others: RouterSamples) -> int | None:
    """Return the first layer whose routers differ by more than rounding; None if all agree."""
    for layer, pair in enumerate(zip(ours, others, strict=True)):
        a_S, b_S = (np.frombuffer(bytes.fromhex(text), dtype="<f4") for text in pair)
        allowed_S = ROUNDING * np.maximum(np.abs(a_S), np.abs(b_S)) + SMALLEST
        if not np.all(np.abs(a_S - b_S) <= allowed_S):
            return layer
    return None
