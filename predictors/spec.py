"""The model for which a trace, predictor or zoo entry was made, and the check against others."""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from predictors.errors import MoecastError

SAMPLES = 16
"""Weights of each layer's router, evenly spaced over the matrix: any training moves most of them.

Samples show whether a checkpoint is a quantisation of another: formats of four to eight bits leave
routers as they are, or round them to another float. So two checkpoints whose routers agree within
that rounding choose experts from nearly the same states."""
ROUNDING = 2.0**-8
"""Twice the relative error of bfloat16: either side may have been rounded to it."""
SMALLEST = 2.0**-24
"""The smallest number of float16; below its normal numbers the error is half of that."""

RouterSamples = tuple[str, ...]
"""For each layer, `SAMPLES` weights as little-endian float32, in hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The properties of a base model on which routing depends."""

    model_id: str
    revision: str
    """Commit on the Hub, or the sha256 over the weight files' headers of a local folder."""
    config_hash: str
    """`config_hash` of the model's `config.json`."""
    num_layers: int
    """Number of layers with routed experts; they are numbered from 0, without dense layers."""
    num_experts: int
    top_k: int
    hidden_size: int
    dtype: str
    """Dtype of the activations that predictors receive, for example `float32`."""
    routers: RouterSamples | None = field(default=None, compare=False, repr=False)
    """None where routers are not one matrix each, or were not recorded."""
    base: str | None = field(default=None, compare=False)
    """`model_id` of the model that this one is a quantisation of, if the user names it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the properties that specs are compared by."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.compare}

    @property
    def identity(self) -> dict[str, str]:
        """The fields that name the model; the others follow from it, and from the dtype."""
        return {
            "model_id": self.model_id,
            "revision": self.revision,
            "config_hash": self.config_hash,
        }

    def require(
        self, other: "ModelSpec", *, this: str, that: str, error: type[MoecastError], hint: str
    ) -> None:
        """Raises `error` if the two differ; the message has both values of every difference."""
        values = other.as_dict()
        wrong = [
            f"{name}: {this} has {value!r}, {that} has {values[name]!r}"
            for name, value in self.differences(other).items()
        ]
        if wrong:
            raise error(f"{this} and {that} do not match ({'; '.join(wrong)}). {hint}")

    def differences(self, other: "ModelSpec") -> dict[str, Any]:
        """Returns the properties in which the two differ, with their values here."""
        values = other.as_dict()
        return {name: value for name, value in self.as_dict().items() if value != values[name]}

    def serves(self, other: "ModelSpec") -> bool:
        """Return whether predictors of this model serve the other, which may be quantised.

        They do if the two differ in dtype alone; and if their sizes are equal, and the routers
        agree or, where these were not recorded, the user names this model as the other's base.
        """
        different = self.differences(other).keys() - {"dtype"}
        if not different:
            return True
        if different - self.identity.keys():
            return False
        if self.routers is not None and other.routers is not None:
            return find_router_difference(self.routers, other.routers) is None
        return other.base is not None and other.base == self.model_id

    def describe_router_difference(self, other: "ModelSpec") -> str:
        """Return a sentence on the routers of two models of equal sizes; empty if they agree."""
        if self.routers is None or other.routers is None:
            return ""
        layer = find_router_difference(self.routers, other.routers)
        return "" if layer is None else f"The routers differ from layer {layer} on. "


NOT_ROUTING = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
    "use_cache",
)


def config_hash(config: Mapping[str, Any]) -> str:
    """Returns the sha256 of `config.json` without the keys that do not affect routing."""
    kept = {key: value for key, value in config.items() if key not in NOT_ROUTING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


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
