"""Single tokens of several sequences, computed in one forward pass as a block of rows.

A block has one of a few numbers of rows, of which kernels compute each with the same bits, whatever
the other rows are (`runtime.hf.sharing` tries that when a model is loaded). Missing rows are filled
up with copies, so a sequence's bits depend neither on the others nor on their number. Attention is
computed sequence by sequence over its own KV cache, and experts row by row (`runtime.hf.experts`),
because how many rows they have depends on the others.

A single row is multiplied by other kernels than several rows, so the last bits differ from those of
a sequence that is computed alone. They are those of Transformers for a batch of `NUM_ROWS` copies
of the sequence (`runtime.hf.sharing`).

Shape suffixes: B rows of the block, H heads, D width of a head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from runtime.hf.experts import separate_rows

NUM_ROWS = 8
"""Rows of the largest block. With 2 rows, kernels for small products depend on the other row."""

SMALL_BLOCK_ROWS = 4
"""Rows of a block of a few sequences. Products of 4 and of 8 rows had the same bits in float32 with
one and two threads; those of 1 to 3 rows, or with two threads of 5 to 7, had others."""

CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of a KV cache that hold nothing but keys and values of the tokens that are attended to."""


class SequenceStates:
    """Keys or values of each sequence `(1, H, T, D)`, in place of one tensor of a batch.

    Only attention can use it.

    Args:
        window: number of tokens that a layer attends to at most; None: all.
    """

    def __init__(self, states: Sequence[Tensor], window: int | None = None):
        self.states = states
        self.window = window

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"its layers use {name} of cached states outside of attention")

    def make_mask(self, states_1HTD: Tensor) -> Tensor | None:
        """Return the mask that Transformers makes for a sequence's token, `(1, 1, 1, T)`.

        Its layer holds no token outside of the window, but PyTorch computes other bits with a mask
        than without one.
        """
        num_tokens = states_1HTD.shape[2]
        if self.window is None or num_tokens < self.window:
            return None
        return torch.ones(1, 1, 1, num_tokens, dtype=torch.bool, device=states_1HTD.device)


class BlockCacheLayer(CacheLayerMixin):
    """One layer of the KV caches of the block's sequences."""

    def __init__(self, layers: Sequence[DynamicLayer]):
        super().__init__()
        self.is_initialized = True
        self._layers = layers
        self._before: list[tuple[Tensor, Tensor, int]] | None = None
        """Keys, values and length of layers with a window, which drop their first token."""
        self._lengths: list[int] = []
        """Numbers of tokens before `update`; none until then."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layers have held a prompt before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Add a token to each sequence; returns `SequenceStates` of all its keys and values."""
        window = None
        if isinstance(self._layers[0], DynamicSlidingWindowLayer):
            window = self._layers[0].sliding_window
            self._before = [
                (layer.keys, layer.values, layer.cumulative_length) for layer in self._layers
            ]
        self._lengths = [layer.get_seq_length() for layer in self._layers]
        updated = [
            layer.update(key_1H1D, value_1H1D, *args, **kwargs)
            for layer, key_1H1D, value_1H1D in zip(
                self._layers, key_states.split(1), value_states.split(1), strict=False
            )
        ]
        keys, values = zip(*updated, strict=True)
        return SequenceStates(keys, window), SequenceStates(values, window)

    def undo(self) -> None:
        """Remove the tokens that `update` has added, to some sequences where it failed."""
        for number, length in enumerate(self._lengths):
            layer = self._layers[number]
            if self._before is None:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            else:
                layer.keys, layer.values, layer.cumulative_length = self._before[number]

    def get_seq_length(self) -> int:
        return int(self._layers[0].get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes for which no mask is made: `SequenceStates` makes one for each sequence."""
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class BlockCache(Cache):
    """The KV caches of the block's sequences."""

    def __init__(self, caches: Sequence[Cache]):
        layers = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[BlockCacheLayer(layer) for layer in layers])

    def undo(self) -> None:
        """Remove the token that the forward pass has added to some of the layers."""
        for layer in self.layers:
            layer.undo()


def attend_by_sequence(
    attend: Callable[..., tuple[Tensor, None]],
    query: Tensor,
    key: SequenceStates,
    value: SequenceStates,
) -> tuple[Tensor, None]:
    """Return the attention `[B, 1, H, D]` of queries `[B, H, 1, D]`; spare rows are the first's.

    Args:
        attend: computes one sequence's, of query, keys, values and mask.
    """
    with _one_thread():
        outputs = [
            attend(
                # A copy: where a tensor is aligned may change the last bits.
                query_1H1D.clone(memory_format=torch.contiguous_format),
                key_1HTD,
                value_1HTD,
                key.make_mask(key_1HTD),
            )[0]
            for query_1H1D, key_1HTD, value_1HTD in zip(
                query.split(1), key.states, value.states, strict=False
            )
        ]
    return concatenate(outputs, len(query)), None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: several divide the keys of one sequence, but not of a batch."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def concatenate(rows: Sequence[Tensor], num_rows: int) -> Tensor:
    """Return a block of the rows, and of copies of the first in place of those that are missing."""
    return torch.cat([*rows, *[rows[0]] * (num_rows - len(rows))])


@dataclass(frozen=True)
class DecodeStep:
    """A forward pass of one token of one sequence."""

    token_11: Tensor
    position_11: Tensor
    cache: Cache
    options: Mapping[str, Any]
    """The model's other arguments, which are the same for all of a block."""

    def advance(self) -> "DecodeStep":
        """Return a step of the same token at the next position."""
        return replace(self, position_11=self.position_11 + 1)


OPTIONS = ("use_cache", "return_dict", "logits_to_keep")


def read_decode_step(args: tuple, kwargs: Mapping[str, Any]) -> DecodeStep | None:
    """Return what a model's forward pass is given, if it can be a row of a block."""
    known = {"input_ids", "attention_mask", "position_ids", "past_key_values", *OPTIONS}
    given = {name: value for name, value in kwargs.items() if value is not None}
    cache, token = given.get("past_key_values"), given.get("input_ids")
    if args or not known.issuperset(given) or cache is None or token is None:
        return None
    if type(cache) is not DynamicCache:
        return None
    if token.shape != (1, 1) or not (given.get("use_cache", True) and given.get("return_dict", 1)):
        return None
    length = int(cache.get_seq_length())
    is_plain = not cache.offloading and all(type(layer) in CACHE_LAYERS for layer in cache.layers)
    if length == 0 or not is_plain:
        return None
    mask = given.get("attention_mask")
    if mask is not None and not (mask.shape == (1, length + 1) and bool(mask.all())):
        return None
    position = given.get("position_ids")
    if position is None:
        position = torch.full_like(token, length)
    if position.shape != (1, 1):
        return None
    return DecodeStep(
        token, position, cache, {name: given[name] for name in OPTIONS if name in given}
    )


def compute_block(
    forward: Callable[..., Any], steps: Sequence[DecodeStep], heights: Sequence[int]
) -> list[Any]:
    """Run one forward pass for several sequences and return the output of each.

    If it raises an error, the KV caches are as they were.

    Args:
        heights: numbers of rows that a block may have, ascending.
    """
    num_rows = next(height for height in heights if height >= len(steps))
    cache = BlockCache([step.cache for step in steps])
    before = separate_rows.set(len(steps))
    try:
        output = forward(
            input_ids=concatenate([step.token_11 for step in steps], num_rows),
            position_ids=concatenate([step.position_11 for step in steps], num_rows),
            past_key_values=cache,
            **steps[0].options,
        )
    except BaseException:
        cache.undo()
        raise
    finally:
        separate_rows.reset(before)
    return [
        type(output)(logits=logits, past_key_values=step.cache)
        for logits, step in zip(output.logits.split(1), steps, strict=False)
    ]
