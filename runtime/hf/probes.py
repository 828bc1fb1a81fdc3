"""The hooks that show a model's routing to live predictors and to the recorder alike.

Shape suffixes: T tokens of the step (batch x sequence, padding included), D hidden size,
E experts, K top_k.
"""

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from predictors.base import Floats, Ints, Signal
from runtime.errors import CheckpointError
from runtime.hf.layers import MoeLayer, moe_layers

RMS_EPSILON = 1e-6


class Listener(Protocol):
    """Receives a step's events in order. Arrays are valid during the call only.

    `requests_T` numbers the requests from the probes' first on: a step without a past begins new
    ones, one for each row of its batch.
    """

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None: ...

    def layer_input(self, layer: int, hidden_TD: Floats) -> None: ...

    def gate_input(self, layer: int, hidden_TD: Floats) -> None: ...

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None: ...

    def end_step(self) -> None: ...


class SilentListener:
    """Hears everything and does nothing: a base for those that want an event or two."""

    def begin_step(self, *_: object) -> None:
        """Ignored."""

    def layer_input(self, *_: object) -> None:
        """Ignored."""

    def gate_input(self, *_: object) -> None:
        """Ignored."""

    def routed(self, *_: object) -> None:
        """Ignored."""

    def end_step(self, *_: object) -> None:
        """Ignored."""


def to_floats(tensor: Tensor) -> Floats:
    """`(..., width)` as a float32 array `(T, width)`; no copy for contiguous float32 on the CPU."""
    flat = tensor.detach().reshape(-1, tensor.shape[-1])
    return flat.to(device="cpu", dtype=torch.float32).numpy()


def normalised(hidden: Tensor) -> Tensor:
    """Scaled to unit root mean square, without the model's learned weights: the same for every
    architecture, whatever its own norm is called and wherever it stands."""
    hidden = hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + RMS_EPSILON)


def routing_of(output: object) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`(indices, logits, weights)` from what a router returns.

    Transformers' routers return `(logits_TE, weights_TK, indices_TK)` in float and integer dtypes;
    the indices are told by their dtype, because some families add a bias after the logits.
    """
    parts = [
        part for part in (output if isinstance(output, tuple) else ()) if isinstance(part, Tensor)
    ]
    indices = next((part for part in parts if not part.is_floating_point()), None)
    if indices is None:
        raise CheckpointError("this model's router does not return the chosen experts")
    floats = [part for part in parts if part.is_floating_point()]
    top_k = indices.shape[-1]
    weights = next((part for part in floats if part.shape == indices.shape), None)
    logits = next((part for part in floats if part.shape[-1] != top_k), None)
    return indices, logits, weights


def _past_length(cache: Any) -> int:
    """Tokens that the step's key-value cache holds already: 0 in the first step of a request."""
    return 0 if cache is None else int(cache.get_seq_length())


class Probes:
    """Attaches a listener to a model; a context manager, and `close` detaches it.

    Only what is in `signals` is captured: a hook that nobody listens to costs nothing.
    """

    def __init__(self, model: PreTrainedModel, signals: Collection[Signal], listener: Listener):
        self._listener = listener
        self._first_request = 0
        self._num_rows = 0
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        for layer in moe_layers(model):
            if Signal.LAYER_INPUT in signals:
                self._add(
                    layer.block.register_forward_pre_hook(
                        self._layer_input(layer), with_kwargs=True
                    )
                )
            if Signal.GATE_INPUT in signals:
                self._add(layer.router.register_forward_pre_hook(self._gate_input(layer)))
            if Signal.ROUTED in signals:
                self._add(layer.router.register_forward_hook(self._routed(layer)))

    def _add(self, handle) -> None:
        self._handles.append(handle)

    def __enter__(self) -> "Probes":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Detaches every hook; the model is as it was."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            raise CheckpointError("the probes need input_ids; inputs_embeds carry no token ids")
        num_rows, num_tokens = tokens.shape
        if _past_length(kwargs.get("past_key_values")) == 0:
            self._first_request += self._num_rows
            self._num_rows = num_rows
        rows = np.repeat(np.arange(num_rows, dtype=np.int64), num_tokens)
        self._listener.begin_step(
            tokens.detach().reshape(-1).to("cpu", torch.int64).numpy(), self._first_request + rows
        )

    def _end(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        self._listener.end_step()

    def _layer_input(self, layer: MoeLayer):
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._listener.layer_input(layer.index, to_floats(normalised(hidden)))

        return hook

    def _gate_input(self, layer: MoeLayer):
        def hook(_module: nn.Module, args: tuple) -> None:
            self._listener.gate_input(layer.index, to_floats(args[0]))

        return hook

    def _routed(self, layer: MoeLayer):
        def hook(_module: nn.Module, _args: tuple, output: object) -> None:
            indices, logits, weights = routing_of(output)
            self._listener.routed(
                layer.index,
                indices.detach().reshape(-1, indices.shape[-1]).to("cpu", torch.int64).numpy(),
                None if logits is None else to_floats(logits),
                None if weights is None else to_floats(weights),
            )

        return hook
