"""Samples of a model's routers: they show whether a checkpoint is a quantisation of another.

Formats of four to eight bits leave routers as they are, or round them to another float. So two
checkpoints whose routers agree within that rounding choose experts from nearly the same states.
"""

import struct
from collections.abc import Sequence

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


def encode_samples(layers: Sequence[Sequence[float]]) -> RouterSamples:
    """Return the samples of all layers, `SAMPLES` of each."""
    return tuple(struct.pack(f"<{SAMPLES}f", *samples).hex() for samples in layers)


def find_router_difference(ours: RouterSamples, others: RouterSamples) -> int | None:
    """Return the first layer whose routers differ by more than rounding; None if all agree."""
    for layer, pair in enumerate(zip(ours, others, strict=True)):
        own, other = (struct.unpack(f"<{SAMPLES}f", bytes.fromhex(text)) for text in pair)
        if not all(map(are_close, own, other)):
            return layer
    return None


def are_close(a: float, b: float) -> bool:
    """Return whether two weights differ by rounding at most; not if one is NaN."""
    return abs(a - b) <= ROUNDING * max(abs(a), abs(b)) + SMALLEST
