"""Replaces the choices of a model's routers by those of a log, so that its locality is real.

Shape suffixes: N tokens of the log, T tokens of the step, L layers, K top_k.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runtime.errors import RoutingLogError
from runtime.hf.layers import MoeLayer
from runtime.sim.routing_log import read_routing_log

MEANINGLESS = "routing is forced by a log: the text is meaningless, only times and bytes count"
"""Shown with every result of a model whose routing is forced."""


def force_routing(layers: Sequence[MoeLayer], log: Path | None) -> AbstractContextManager:
    """Makes the routers choose what the log's file names, until the context ends.

    Without a file they choose themselves.

    Raises:
        RoutingLogError: the file is not a routing log, or does not fit the model.
    """
    return (
        nullcontext() if log is None else ForcedRouting(layers, read_routing_log(log).experts_NLK)
    )


class ForcedRouting:
    """Makes every router choose what the log names, in place of its own choice.

    The tokens of each layer take the log's tokens one after another, and begin again at its end.
    The weights remain the router's, in its order. Attach it before probes and predictors, which
    then observe the forced choice. Plain Transformers with the same log is the exact reference.

    Args:
        layers: The model's layers with routed experts.
        experts_NLK: The experts that the log names; its first layers are used.

    Raises:
        RoutingLogError: the log has too few layers, another top_k, or experts the model has not.
    """

    def __init__(self, layers: Sequence[MoeLayer], experts_NLK: NDArray):
        least = min(layer.num_experts for layer in layers)
        require_fit(experts_NLK, num_layers=len(layers), num_experts=least)
        self._experts_NLK = torch.from_numpy(experts_NLK)
        self._num_tokens_L = [0] * len(layers)
        """Tokens that each layer has routed so far."""
        self._handles = [
            layer.router.register_forward_hook(self._replace(layer), prepend=True)
            for layer in layers
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets the routers choose again."""
        while self._handles:
            self._handles.pop().remove()

    def _replace(self, layer: MoeLayer) -> Any:
        def hook(_module: nn.Module, _args: tuple, output: object) -> object:
            parts = list(output) if isinstance(output, tuple) else [output]
            place = next((i for i, part in enumerate(parts) if is_choice(part)), None)
            if place is None:
                raise RoutingLogError(
                    f"routing: {layer.name}: this model's router does not return the experts that "
                    "it has chosen, so that they cannot be replaced"
                )
            parts[place] = self._next(layer.index, parts[place])
            return tuple(parts) if isinstance(output, tuple) else parts[0]

        return hook

    def _next(self, layer: int, chosen: Tensor) -> Tensor:
        """Returns the log's next experts in the shape and dtype of the router's choice."""
        top_k, logged_k = chosen.shape[-1], self._experts_NLK.shape[-1]
        if top_k != logged_k:
            raise RoutingLogError(
                f"routing: the log has {logged_k} experts per token, the model {top_k}"
            )
        num_tokens = chosen.numel() // top_k
        first = self._num_tokens_L[layer]
        self._num_tokens_L[layer] += num_tokens
        rows_T = torch.arange(first, first + num_tokens) % len(self._experts_NLK)
        experts_TK = self._experts_NLK[rows_T, layer]
        return experts_TK.to(device=chosen.device, dtype=chosen.dtype).reshape(chosen.shape)


def require_fit(experts_NLK: NDArray, *, num_layers: int, num_experts: int) -> None:
    """Raise RoutingLogError if the log has fewer layers, or experts that the model has not."""
    logged, highest = experts_NLK.shape[1], int(experts_NLK.max())
    if logged < num_layers or highest >= num_experts:
        raise RoutingLogError(
            f"routing: the log has {logged} layers and experts up to {highest}; the model "
            f"has {num_layers} layers of {num_experts} experts"
        )


def is_choice(part: object) -> bool:
    """Returns whether a part of a router's output holds ids of experts."""
    return isinstance(part, Tensor) and not part.is_floating_point()
