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


def _past_length(cache: Any) -> int:
    """Tokens that the step's key-value cache holds already: 0 in the first step of a request."""
    return 0 if cache is None else int(cache.get_seq_length())


class _Steps:
    """Tells the steps of a model's parts: when each begins and ends, whose tokens it computes.

    A decoder-only model has one part, the model. Of a model with an encoder each has steps of its
    own: `generate` calls the encoder by itself, and their tokens differ.
    """

    def __init__(self, model: PreTrainedModel, listener: Listener):
        self._listener = listener
        self._first_request = 0
        self._num_requests = 0
        self._is_encoded = False
        """An encoder's step has begun new requests that no decoder's step has continued yet."""
        if model.config.is_encoder_decoder:
            parts = [(model.get_encoder(), self._encoder), (model.get_decoder(), self._decoder)]
        else:
            parts = [(model, self._decoder)]
        self.handles = []
        for part, begin in parts:
            self.handles.append(part.register_forward_pre_hook(begin, with_kwargs=True))
            self.handles.append(part.register_forward_hook(self._end, always_call=True))

    def _encoder(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        tokens = _tokens(args, kwargs)
        self._new_requests(len(tokens))
        self._is_encoded = True
        self._begin(tokens)

    def _decoder(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        tokens = _tokens(args, kwargs)
        if _past_length(kwargs.get("past_key_values")) == 0:
            # Beams of an encoded request are decoder rows one after another.
            continues = self._is_encoded and len(tokens) % self._num_requests == 0
            if not continues:
                self._new_requests(len(tokens))
            self._is_encoded = False
        self._begin(tokens)

    def _new_requests(self, count: int) -> None:
        self._first_request += self._num_requests
        self._num_requests = count

    def _begin(self, tokens: Tensor) -> None:
        num_rows, num_tokens = tokens.shape
        rows_per_request = max(1, num_rows // max(1, self._num_requests))
        rows = np.repeat(np.arange(num_rows, dtype=np.int64) // rows_per_request, num_tokens)
        self._listener.begin_step(
            tokens.detach().reshape(-1).to("cpu", torch.int64).numpy(), self._first_request + rows
        )

    def _end(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        self._listener.end_step()


def _tokens(args: tuple, kwargs: dict) -> Tensor:
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if tokens is None:
        raise CheckpointError("the probes need input_ids; inputs_embeds carry no token ids")
    return tokens


class Probes:
    """Attaches a listener to a model; a context manager, and `close` detaches it.

    Only what is in `signals` is captured: a hook that nobody listens to costs nothing.
    """

    def __init__(self, model: PreTrainedModel, signals: Collection[Signal], listener: Listener):
        self._listener = listener
        self._handles = _Steps(model, listener).handles
        layers = moe_layers(model)
        self._num_experts = max(layer.num_experts for layer in layers)
        for layer in layers:
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
        num_experts = layer.num_experts

        def hook(_module: nn.Module, _args: tuple, output: object) -> None:
            indices, logits, weights = layer.routing(output)
            experts_TK = indices.detach().reshape(-1, indices.shape[-1]).to("cpu", torch.int64)
            self._listener.routed(
                layer.index,
                # One id for every way to skip, whatever the model calls it in this layer.
                experts_TK.masked_fill(experts_TK >= num_experts, self._num_experts).numpy(),
                None if logits is None else to_floats(logits[..., :num_experts]),
                None if weights is None else to_floats(weights),
            )

        return hook
