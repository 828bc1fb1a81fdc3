"""The hooks that show a model's routing to live predictors and to the recorder alike.

Shape suffixes: T tokens of the step (batch x sequence, padding included), D hidden size,
E experts, K top_k.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from predictors.base import Floats, Ints, Signal
from predictors.networks import kernels
from runtime.accelerator import copy_together, keep_copy
from runtime.errors import CheckpointError
from runtime.hf.forward_pass import find_generating_parts, find_tokens, surround_forward
from runtime.hf.layers import MoeLayer, find_moe_layers

RMS_EPSILON = 1e-6

ROUTER_SIGNALS = {Signal.ROUTED, Signal.LOGITS, Signal.WEIGHTS}
"""Signals that a router's output carries."""


class EventListener(Protocol):
    """Receives a step's events in order.

    Arrays are valid during the call only, a router's input until its layer's `routed` has returned,
    which follows at once.

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


Listens = Callable[[Signal, int], bool]
"""`(signal, layer) -> whether somebody uses this hidden state, or routing, in this step`."""


def to_ints(indices: Tensor) -> Ints:
    """`(..., width)` as an int64 array `(rows, width)`; no copy for int64 on the CPU."""
    array = (indices if indices.is_cpu else indices.cpu()).numpy()
    return array.reshape(-1, array.shape[-1]).astype(np.int64, copy=False)


def to_floats(tensor: Tensor) -> Floats:
    """`(..., width)` as a float32 array `(T, width)`; no copy for contiguous float32 on the CPU."""
    width = tensor.shape[-1]
    if (
        kernels is not None
        and tensor.dtype is torch.bfloat16
        and tensor.is_cpu
        and tensor.is_contiguous()
    ):
        array = np.empty((tensor.numel() // width, width), np.float32)
        kernels.widen(tensor.data_ptr(), array)
        return array
    flat = tensor.detach().reshape(-1, width)
    return flat.to(device="cpu", dtype=torch.float32).numpy()


def normalize(hidden: Tensor) -> Tensor:
    """Scale to unit root mean square, without the model's learned weights.

    The result is comparable across architectures, whose own norms differ in name and place.
    """
    hidden = hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + RMS_EPSILON)


class RequestTracker:
    """The requests that a generation's forward passes belong to.

    Generations that alternate on one model have one each; otherwise there is one for all.
    """

    def __init__(self) -> None:
        self.first_request = 0
        self.num_requests = 0
        self._cache: weakref.ref | None = None
        """The KV cache of the step before, where caches do not count their tokens."""
        self._is_encoded = False
        """An encoder's step has begun new requests that no decoder's step has continued yet."""
        self.part = "decoder"
        """Part of the model that ran the last forward pass."""

    def begins_requests(self, num_rows: int, cache: Any, *, is_encoder: bool) -> bool:
        """Return whether the next step, of so many rows, begins new requests."""
        self.part = "encoder" if is_encoder else "decoder"
        if is_encoder:
            self._is_encoded = True
            return True
        # The first step begins requests even with a past, which an earlier text has left.
        if self.has_past(cache) and self.num_requests:
            return False
        # Beams of an encoded request are decoder rows one after another.
        continues = self._is_encoded and num_rows % self.num_requests == 0
        self._is_encoded = False
        return not continues

    def has_past(self, cache: Any) -> bool:
        """Return whether a step's KV cache holds tokens.

        Caches of recurrent layers alone do not count tokens: such a step has a past if the step
        before had the same cache.
        """
        if cache is None:
            return False
        try:
            return int(cache.get_seq_length()) > 0
        except (AttributeError, TypeError, ValueError):
            is_known = self._cache is not None and self._cache() is cache
            self._cache = weakref.ref(cache) if hasattr(cache, "__weakref__") else None
            return is_known


class Probes:
    """Attaches a listener to a model; a context manager, and `close` detaches it.

    Only the given signals are captured. A router's input and its choice are reported together, when
    it has run: bytes of what it has chosen are on their way while forecasts are made.

    Args:
        layers: the model's layers with experts, if they were found before.
        complete: raise an error for routers that do not return their choice; otherwise the listener
            gets no events of such layers.
        heard: hidden states that are captured, each with its layer; None: all of `signals`.
        listens: asked before a hidden state is captured; None: all are used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        signals: Collection[Signal],
        listener: EventListener,
        *,
        layers: Sequence[MoeLayer] | None = None,
        complete: bool = False,
        heard: Collection[tuple[Signal, int]] | None = None,
        listens: Listens | None = None,
    ):
        self.listener = listener
        """Receives the events; may be replaced between forward passes."""
        self.lane = RequestTracker()
        """Tracker of the generation whose forward passes come next."""
        self._complete = complete
        self._listens = listens or (lambda _signal, _layer: True)
        self._has_logits = Signal.LOGITS in signals
        self._has_weights = Signal.WEIGHTS in signals
        self._next_request = 0
        # A decoder-only model has one part, the model. In an encoder-decoder model each part has
        # steps, because `generate` calls the encoder separately, with other tokens.
        encoder = model.get_encoder() if model.config.is_encoder_decoder else None
        self._handles: list[Any] = [
            surround_forward(
                part,
                partial(self._begin_step, is_encoder=part is encoder),
                lambda: self.listener.end_step(),
            )
            for part in find_generating_parts(model)
        ]
        add = self._handles.append
        layers = find_moe_layers(model) if layers is None else layers
        self._num_experts = max(layer.num_experts for layer in layers)
        for layer in layers:
            hears_input, hears_gate = (
                signal in signals and (heard is None or (signal, layer.index) in heard)
                for signal in (Signal.LAYER_INPUT, Signal.GATE_INPUT)
            )
            if hears_input:
                hook = self._layer_input(layer)
                add(layer.block.register_forward_pre_hook(hook, with_kwargs=True))
            if hears_gate or ROUTER_SIGNALS & set(signals):
                hook = self._routed(layer, hears_gate=hears_gate)
                add(layer.router.register_forward_hook(hook, with_kwargs=True))

    def __enter__(self) -> "Probes":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Detaches every hook; the model is as it was."""
        while self._handles:
            self._handles.pop().remove()

    def _begin_step(self, args: tuple, kwargs: dict, *, is_encoder: bool) -> None:
        """Report the beginning of a step, with its tokens and their requests."""
        tokens, lane = find_tokens(args, kwargs), self.lane
        if tokens.ndim != 2 or not tokens.numel():
            raise CheckpointError(
                f"the input's shape is {tuple(tokens.shape)}; give at least one token, as "
                "(batch, sequence)"
            )
        num_rows, num_tokens = tokens.shape
        cache = kwargs.get("past_key_values")
        if lane.begins_requests(num_rows, cache, is_encoder=is_encoder):
            lane.first_request, lane.num_requests = self._next_request, num_rows
            self._next_request += num_rows
        rows_per_request = max(1, num_rows // max(1, lane.num_requests))
        rows = np.repeat(np.arange(num_rows, dtype=np.int64) // rows_per_request, num_tokens)
        self.listener.begin_step(to_ints(tokens).ravel(), lane.first_request + rows)

    def _layer_input(self, layer: MoeLayer):
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not self._listens(Signal.LAYER_INPUT, layer.index):
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            if hidden.ndim == 4:
                # Hyper-connections: (batch, sequence, streams, D), all of them one token's.
                hidden = hidden.float().mean(dim=2)
            self.listener.layer_input(layer.index, to_floats(normalize(hidden)))

        return hook

    def _routed(self, layer: MoeLayer, *, hears_gate: bool):
        index, num_experts, skipped = layer.index, layer.num_experts, self._num_experts

        def hook(_module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            try:
                indices, logits, weights = layer.adapter.routing(output, layer.router, layer.parent)
            except CheckpointError:
                if self._complete:
                    raise
                return
            if not (indices.is_cpu or self._listens(Signal.ROUTED, index)):
                return
            hidden = None
            if hears_gate and self._listens(Signal.GATE_INPUT, index):
                hidden = args[0] if args else kwargs["hidden_states"]
            logits = logits[..., :num_experts] if self._has_logits and logits is not None else None
            weights = weights if self._has_weights else None
            if not indices.is_cpu:
                chosen = indices
                parts = copy_together([indices, hidden, logits, weights])
                indices, hidden, logits, weights = parts
                keep_copy(chosen, indices)
            if hidden is not None:
                self.listener.gate_input(index, to_floats(hidden))
            experts_TK = to_ints(indices)
            # Of one token's few ids, the interpreter finds the largest sooner than NumPy.
            is_token = len(experts_TK) == 1
            largest = max(experts_TK[0].tolist()) if is_token else experts_TK.max(initial=0)
            if largest >= num_experts:
                # One id for "skip": models use several.
                experts_TK = np.where(experts_TK >= num_experts, skipped, experts_TK)
            self.listener.routed(
                index,
                experts_TK,
                None if logits is None else to_floats(logits),
                None if weights is None else to_floats(weights),
            )

        return hook
