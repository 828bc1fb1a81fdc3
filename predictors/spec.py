"""What a trace, a predictor or a zoo entry was made for, and the refusal of anything else."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from predictors.errors import MoecastError


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The base model, as far as routing depends on it."""

    model_id: str
    revision: str
    """Commit on the Hub, or the sha256 over the weight files' headers of a local folder."""
    config_hash: str
    """`config_hash` of the model's `config.json`."""
    num_layers: int
    """Layers with routed experts; they are numbered 0.. from the bottom, dense layers left out."""
    num_experts: int
    top_k: int
    hidden_size: int
    dtype: str
    """Dtype of the activations that predictors see, for example `float32`."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: "ModelSpec") -> dict[str, tuple[Any, Any]]:
        """Fields in which the two differ, with both values."""
        return {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        }

    def require(
        self, other: "ModelSpec", *, this: str, that: str, error: type[MoecastError], hint: str
    ) -> None:
        """Raises `error` when the two differ; the message names both sides of every difference."""
        wrong = self.differences(other)
        if wrong:
            listed = "; ".join(
                f"{name}: {this} has {a!r}, {that} has {b!r}" for name, (a, b) in wrong.items()
            )
            raise error(f"{this} and {that} do not belong together ({listed}). {hint}")


NOT_ROUTING = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
    "use_cache",
)


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 over the canonical JSON of `config.json`, without what says nothing of routing."""
    kept = {key: value for key, value in config.items() if key not in NOT_ROUTING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
