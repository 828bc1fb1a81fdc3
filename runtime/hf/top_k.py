"""How many experts a model's tokens use."""

from collections.abc import Iterable

from transformers import PreTrainedModel

from runtime.errors import CheckpointError
from runtime.hf.layers import MoeLayer

CONFIG_NAMES = ("num_experts_per_tok", "moe_top_k", "top_k_experts")
"""Only asked where no router says it; Transformers maps most families' names to the first."""


def find_top_k(model: PreTrainedModel, layers: Iterable[MoeLayer]) -> int:
    """The most that any layer's router chooses for one token.

    Raises:
        CheckpointError: neither the routers nor the configuration say.
    """
    config = model.config.get_text_config()
    parts = (config, getattr(config, "ffn_config", None))
    layers = list(layers)
    values = [layer.top_k for layer in layers]
    values += [getattr(layer.router, "top_k", None) for layer in layers]
    values += [getattr(part, name, None) for part in parts for name in CONFIG_NAMES]
    known = [value for value in values if isinstance(value, int)]
    if not known:
        raise CheckpointError(f"{type(config).__name__} does not say how many experts a token uses")
    return max(known)
