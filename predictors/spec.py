"""The model for which a trace, predictor or zoo entry was made, and the check against others."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from predictors.errors import MoecastError


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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

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
