"""One answer: the model's own `generate` runs, tokens become text, and the end is found.

`chat`, `generate` and the server all answer with this. Pieces are delivered by a call rather than
an iterator: `generate` calls back for each token, and a coroutine that turned this around would
hide the one in which a lockstep group runs the sequence.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from runtime.generation.constraint import Constraint
from runtime.generation.detokenizer import Detokenizer, StopStringMatcher
from runtime.generation.prefix_cache import RunningText
from runtime.generation.sampling import LogprobRecorder, TokenLogprob, listen_to_tokens


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its text, or wrote a stop string."""
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """It wants tools to be called, and has ended its text."""
    ABORT = "abort"
    """The client disconnected, the request was cancelled, or the user pressed Ctrl-C."""
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class TokenDelta:
    """Text that one token adds; it may be empty, or include text that earlier tokens held back."""

    text: str
    token: int | None
    """None for text that was held back until the end."""
    offset: int = 0
    """Characters of the answer before the token's own text."""
    logprob: TokenLogprob | None = None


class Answer:
    """One answer. Times are of `time.monotonic`, None until then.

    Args:
        deliver: receives each token with the text that it adds.
        stop: strings that end the answer and are left out of it.
        end_ids: tokens that end it and are no text.
        min_tokens: number of tokens whose text no stop string ends.
        shown_ids: special tokens that are text.
        recorder: gives each token's log-probability; it is among `generate`'s logits processors.
        constraint: ends the answer where its grammar does; its mask is among these too.
    """

    def __init__(
        self,
        deliver: Callable[[TokenDelta], None],
        *,
        stop: Sequence[str] = (),
        end_ids: Collection[int] = (),
        min_tokens: int = 0,
        shown_ids: Collection[int] = (),
        recorder: LogprobRecorder | None = None,
        constraint: Constraint | None = None,
    ):
        self._deliver = deliver
        self._stops = StopStringMatcher(stop)
        self._end_ids = frozenset(end_ids)
        self._min_tokens = min_tokens
        self._shown_ids = shown_ids
        self._recorder = recorder
        self._constraint = constraint
        self._detokenizer: Detokenizer | None = None
        self._is_stopped = False
        self.num_tokens = 0
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    def generate(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        *,
        cached: RunningText | None = None,
        **options: Any,
    ) -> list[int]:
        """Generate and deliver each token as soon as it is drawn; returns the new tokens.

        Args:
            cached: the KV cache to go on with; None: a new one.
            options: of the model's `generate`.
        """
        listeners: list[Callable[..., Tensor]] = [listen_to_tokens(self.on_token)]
        if cached is not None:
            options["past_key_values"] = cached.cache
            listeners.append(cached)
        self._detokenizer = Detokenizer(tokenizer, shown_ids=self._shown_ids)
        self.started_at = self.started_at or time.monotonic()
        inputs = torch.tensor([prompt], device=model.device)
        output: Any = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            stopping_criteria=StoppingCriteriaList(listeners),
            **options,
        )
        # An encoder-decoder model's output begins with its decoder's start token.
        num_given = 1 if model.config.is_encoder_decoder else len(prompt)
        tokens: list[int] = output[0, num_given:].tolist()
        # Models with their own loop, such as diffusion models, report no single tokens.
        for token in () if self._is_stopped else tokens[self.num_tokens :]:
            self.on_token(token)
        return tokens

    def on_token(self, token: int) -> bool:
        """Record and deliver one token; True if it is the last."""
        assert self._detokenizer is not None
        self.num_tokens += 1
        self.last_token_at = time.monotonic()
        self.first_token_at = self.first_token_at or self.last_token_at
        offset = self._detokenizer.num_characters
        text = ""
        if token in self._end_ids:
            self._is_stopped = True
        else:
            may_end = self.num_tokens > self._min_tokens
            text = self._stops.push(self._detokenizer.push(token), may_end=may_end)
            held_text = self._detokenizer.held_text if may_end else ""
            self._is_stopped = self._stops.is_hit or self._stops.would_match(held_text)
            if self._constraint is not None and self._constraint.push(token):
                self._is_stopped = True
        logprob = None if self._recorder is None else self._recorder.take(token)
        self._deliver(TokenDelta(text=text, token=token, offset=offset, logprob=logprob))
        return self._is_stopped

    def end(self) -> FinishReason:
        """Deliver the text that was held back; returns the reason of the end."""
        if self._detokenizer is not None:
            may_end = self.num_tokens > self._min_tokens
            rest = self._stops.push(self._detokenizer.end(), may_end=may_end) + self._stops.end()
            if rest:
                self._deliver(TokenDelta(text=rest, token=None))
        is_stopped = self._is_stopped or self._stops.is_hit
        return FinishReason.STOP if is_stopped else FinishReason.LENGTH

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._stops.found

    @property
    def seconds(self) -> float:
        """From the prompt to the last token."""
        return (self.last_token_at or 0.0) - (self.started_at or 0.0) if self.num_tokens else 0.0

    @property
    def first_token_seconds(self) -> float | None:
        if self.first_token_at is None or self.started_at is None:
            return None
        return self.first_token_at - self.started_at

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of a token after the first, whose time is the prefill's; None: it has none."""
        if self.first_token_at is None or self.last_token_at is None or self.num_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.num_tokens - 1)
