"""KV caches of texts that have ended, which later prompts with the same beginning go on with.

A prompt goes on where it and a kept text part, at the latest with its own last token, whose logits
are needed. What follows is bitwise what Transformers computes with the same `past_key_values`.

Layers that keep all tokens are cut there. A window that has dropped tokens and a recurrent state
cannot be taken back: they are kept as they were after a prompt and after its answer, and a prompt
goes on where one of these is.

Keys and values are never written in place, as layers join them with new ones to new tensors or put
those into memory of their own behind them (`runtime.hf.growing_cache`): a kept text, which has no
such memory, and those that go on with it share them. States of recurrent layers are written in
place, and copied.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, StoppingCriteria
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from runtime.engine.auto_budget import measure_free_memory
from runtime.hf.forward_pass import find_generating_parts
from runtime.hf.kv import KVCacheBudget, count_layer_bytes
from runtime.hf.sharing import ROPE_BY_LENGTH
from runtime.hf.tokens import rope_parameters

MIN_TOKENS = 16
"""Fewer tokens are not worth last bits that depend on earlier prompts (vLLM's blocks have 16)."""
MAX_TEXTS = 64
"""Texts that are kept: each is compared with each prompt."""

KNOWN_LAYERS = (
    *(DynamicLayer, DynamicSlidingWindowLayer, DummyLayer, LinearAttentionLayer),
    *(LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer),
)
"""Layers that compute the same of a text in two parts as of the whole."""
UNFIT_TYPES = {
    "jamba": "its recurrent layers begin anew where several tokens follow a state",
    "qwen3_omni_moe_thinker": "its positions begin anew after a text that is there",
}
"""Model types that compute something else of a text in two parts, and why."""


def find_prefix_obstacle(model: PreTrainedModel) -> str | None:
    """Return why a model's KV caches cannot be gone on with; None if they can."""
    if model.config.is_encoder_decoder:
        return "it has an encoder"
    if (
        not isinstance(model, GenerationMixin)
        or not model._supports_default_dynamic_cache()
        or find_generating_parts(model) != [model]
    ):
        return "it generates with a KV cache of its own"
    if (reason := UNFIT_TYPES.get(model.config.model_type)) is not None:
        return reason
    kinds = {type(layer) for layer in make_cache(model).layers}
    unknown = sorted(kind.__name__ for kind in kinds.difference(KNOWN_LAYERS))
    if unknown:
        return f"its KV cache consists of {', '.join(unknown)}"
    has_attention = any(issubclass(kind, CacheLayerMixin) for kind in kinds)
    return None if has_attention else "its KV cache does not count tokens"


def find_longest_prompt(model: PreTrainedModel) -> int | None:
    """Return from how many tokens on keys depend on the text's length; None: they never do."""
    text = model.config.get_text_config()
    original = getattr(text, "original_max_position_embeddings", None)
    lengths = [
        rope.get("original_max_position_embeddings") or original or text.max_position_embeddings
        for rope in rope_parameters(text)
        if rope["rope_type"] in ROPE_BY_LENGTH
    ]
    return min(lengths, default=None)


def make_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the empty KV cache that `generate` would make."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def can_be_cut(layer: Any) -> bool:
    """Whether a layer still holds all of its tokens."""
    kind = type(layer)
    if kind is DynamicSlidingWindowLayer:
        return layer.cumulative_length < layer.sliding_window
    return kind in (DynamicLayer, DummyLayer)


def has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def copy_layer(layer: Any, num_tokens: int | None = None) -> Any:
    """Copy a layer, or its first tokens.

    The copy shares keys and values, unless they are part of a larger tensor.
    """
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            states = {key: s.clone() if isinstance(s, Tensor) else s for key, s in value.items()}
            setattr(copied, name, states)
    if has_keys(layer):
        copied.keys, copied.values = (
            _own_memory(tensor_BHTD[..., :num_tokens, :])
            for tensor_BHTD in (layer.keys, layer.values)
        )
        if num_tokens is not None and isinstance(layer, DynamicSlidingWindowLayer):
            copied.cumulative_length = num_tokens
    if hasattr(copied, "record_past"):
        copied.record_past = False  # set where drafts were verified
    return copied


def _own_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def count_common(first_T: NDArray[np.int64], second_T: NDArray[np.int64]) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(first_T), len(second_T))
    differing = np.flatnonzero(first_T[:length] != second_T[:length])
    return int(differing[0]) if len(differing) else length


Layers = Mapping[int, Any]
"""Layers of a KV cache by their index."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KeptText:
    """The KV cache of a text that has ended."""

    tokens_T: NDArray[np.int64]
    whole: Layers
    """Layers that can be cut, as they are after the last token."""
    states: Mapping[int, Layers]
    """By the number of tokens: the other layers after these; none if there are no others."""

    @cached_property
    def num_bytes(self) -> int:
        parts = (self.whole, *self.states.values())
        return sum(count_layer_bytes(layers.values()) for layers in parts)

    def find_length(self, num_common: int) -> int:
        """Return how many tokens a text need not compute that has so many in common with it."""
        if not self.states:
            return num_common
        return max((length for length in self.states if length <= num_common), default=0)

    def resume(self, num_tokens: int) -> list[Any]:
        """Return the layers of a KV cache of its first tokens, a number of `find_length`."""
        copies = {index: copy_layer(layer, num_tokens) for index, layer in self.whole.items()}
        for index, layer in self.states.get(num_tokens, {}).items():
            copies[index] = copy_layer(layer)
        return [copies[index] for index in range(len(copies))]


class RunningText(StoppingCriteria):
    """The KV cache of a text that is being generated; among `generate`'s stopping criteria.

    It stops nothing: these are called between two forward passes, when a cache is whole.

    Args:
        num_reused: tokens that the cache holds already.
        make_room: returns whether so many bytes may be kept for later texts.
    """

    def __init__(self, cache: DynamicCache, num_reused: int, make_room: Callable[[int], bool]):
        self.cache = cache
        self.num_reused = num_reused
        self.states: dict[int, Layers] = {}
        self.num_bytes = 0
        """Bytes of `states`."""
        self._make_room = make_room
        self._tokens_1T: Tensor | None = None
        if num_reused:
            self._keep_states(num_reused)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        if self._tokens_1T is None:
            self._keep_states(int(self.cache.get_seq_length()))  # the prompt's end
        self._tokens_1T = input_ids
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def _keep_states(self, num_tokens: int) -> None:
        layers = enumerate(self.cache.layers)
        states = {index: copy_layer(layer) for index, layer in layers if not can_be_cut(layer)}
        num_bytes = count_layer_bytes(states.values())
        if states and self._make_room(num_bytes):
            self.states[num_tokens] = states
            self.num_bytes += num_bytes

    def forget_states(self) -> None:
        self.states.clear()
        self.num_bytes = 0

    def end(self, *, is_intact: bool) -> KeptText | None:
        """Return what later texts can go on with; None if it is too little."""
        if self._tokens_1T is None:
            return None
        layers = dict(enumerate(self.cache.layers))
        whole = {index: layer for index, layer in layers.items() if can_be_cut(layer)}
        lengths = [
            states_BHTD.shape[-2]
            for layer in whole.values()
            if has_keys(layer)
            for states_BHTD in (layer.keys, layer.values)
        ]
        if is_intact:
            lengths.append(int(self.cache.get_seq_length()))
        # A forward pass that was cut short has added its tokens to the first layers only.
        num_tokens = min([self._tokens_1T.shape[1], *lengths])
        states: dict[int, Layers] = {}
        if rest := layers.keys() - whole.keys():
            if is_intact and self.cache.get_seq_length() == num_tokens:
                self._keep_states(num_tokens)
            # A window that was filled by the answer was no state after the prompt.
            states = {n: kept for n, kept in self.states.items() if kept.keys() == rest}
            num_tokens = max(states, default=0)
        if num_tokens < MIN_TOKENS:
            return None
        return KeptText(
            tokens_T=self._tokens_1T[0, :num_tokens].cpu().numpy(),
            whole={index: copy_layer(layer, num_tokens) for index, layer in whole.items()},
            states=states,
        )


class PrefixCache:
    """The KV caches of the last texts, within a limit. Not thread-safe.

    Args:
        budget: memory for them and for running texts; None: any.
        shares_memory: they take at most half of the memory that is free without them, too.
        max_texts: most texts that are kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        budget: KVCacheBudget | None = None,
        shares_memory: bool = False,
        max_texts: int = MAX_TEXTS,
    ):
        self._model = model
        self._budget = budget
        self._longest_prompt = find_longest_prompt(model)
        self._shares_memory = shares_memory
        self._max_texts = max_texts
        self._limit_bytes: int | None = None
        self._texts: list[KeptText] = []
        """The one that was used last comes last."""
        self._running: list[RunningText] = []

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        """Bytes of kept texts, and of what running ones keep for later ones."""
        return sum(text.num_bytes for text in self._texts) + self._running_bytes

    @property
    def _running_bytes(self) -> int:
        return sum(running.num_bytes for running in self._running)

    def begin(
        self, prompt: Sequence[int], *, running: Iterable[int] | None = None
    ) -> RunningText | None:
        """Return a KV cache that holds as much of a prompt as is kept; `end` takes it back.

        None for a prompt whose keys depend on its length: Transformers' own cache is used.

        Args:
            running: lengths of all running texts, which kept ones leave room for; None: those for
                which they did before.
        """
        is_known = self._longest_prompt is None or len(prompt) <= self._longest_prompt
        best, num_reused = None, 0
        tokens_T = np.asarray(prompt[:-1], np.int64)
        for text in self._texts if is_known else ():
            length = text.find_length(count_common(text.tokens_T, tokens_T))
            if length >= max(MIN_TOKENS, num_reused):
                best, num_reused = text, length
        if best is not None:
            self._texts.remove(best)
            self._texts.append(best)
        if running is not None:
            self.make_room_for(running)
        if not is_known:
            return None
        cache = make_cache(self._model)
        if best is not None:
            cache.layers = best.resume(num_reused)
        begun = RunningText(cache, num_reused, self._make_room)
        self._running.append(begun)
        return begun

    def end(self, running: RunningText, *, is_intact: bool = True) -> None:
        """Keep a text that has ended, in place of kept ones that are its beginning.

        Args:
            is_intact: its last forward pass ran to its end. Otherwise its last tokens are not kept.
        """
        text = running.end(is_intact=is_intact)
        self._running.remove(running)
        if text is None:
            return
        self._texts = [
            kept
            for kept in self._texts
            if count_common(kept.tokens_T, text.tokens_T) < len(kept.tokens_T)
        ]
        if self._make_room(text.num_bytes):
            self._texts.append(text)
            del self._texts[: -self._max_texts]

    def make_room_for(self, running: Iterable[int]) -> None:
        """Keep at most what running texts of these lengths leave of the budget."""
        if self._budget is not None:
            self.limit(self._budget.count_left(running))

    def limit(self, num_bytes: int | None) -> None:
        """Keep so many bytes at most from now on; None: any number."""
        self._limit_bytes = num_bytes
        if not self._make_room(0):
            self.forget()
            for running in self._running:
                running.forget_states()

    def forget(self) -> None:
        """Forget all kept texts."""
        del self._texts[:]

    def _make_room(self, num_bytes: int) -> bool:
        """Forget what was used longest ago until so many bytes fit; False if they never do."""
        limit = self._limit_bytes
        if self._shares_memory:
            half = (self.num_bytes + self._measure_free()) // 2
            limit = half if limit is None else min(limit, half)
        if limit is None:
            return True
        if self._running_bytes + num_bytes > limit:
            return False
        while self.num_bytes + num_bytes > limit:
            del self._texts[0]
        return True

    def _measure_free(self) -> int:
        try:
            return measure_free_memory([self._model.device])[0]
        except OSError:
            return 0  # no descriptor is free to read it with
