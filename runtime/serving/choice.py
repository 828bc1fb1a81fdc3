"""One of a request's n answers: runs the model's own `generate` and reports each token."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from runtime.generation.detokenizer import Detokenizer, StopStringMatcher
from runtime.generation.lockstep.sequence import SequenceTask
from runtime.generation.sampling import (
    LogprobRecorder,
    SamplingParams,
    TokenListener,
    TokenLogprob,
    make_generation_config,
    make_logits_processors,
    prompt_logprobs,
)
from runtime.serving.errors import RequestError


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its text, or wrote a stop string."""
    LENGTH = "length"
    ABORT = "abort"
    """The client disconnected, or the request was cancelled."""
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


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    logprobs: list[TokenLogprob]


@dataclass(frozen=True)
class ChoiceFinished:
    reason: FinishReason


@dataclass(frozen=True)
class ChoiceFailed:
    error: RequestError


ChoiceEvent = TokenDelta | PromptLogprobs | ChoiceFinished | ChoiceFailed


class CompletionChoice:
    """One answer. The request's thread creates it; the engine thread calls everything else.

    Times are of `time.monotonic`, None until then.

    Args:
        deliver: receives the events; called in the engine thread.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        deliver: Callable[[list[ChoiceEvent]], None],
        request_id: str = "",
    ):
        self.prompt = prompt
        self.sampling = sampling
        self.request_id = request_id
        self._deliver = deliver
        self._pending_events: list[ChoiceEvent] = []
        self.task: SequenceTask | None = None
        """The coroutine that generates it, from when it is started."""
        self.num_tokens = 0
        self.is_cancelled = False
        self.arrived_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.ended_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error_code: str | None = None
        """Code or kind of the error that ended it. The error itself would keep frames alive."""
        self._detokenizer: Detokenizer | None = None
        self._stops = StopStringMatcher(sampling.stop)
        self._recorder: LogprobRecorder | None = None
        self._is_stopped = False

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in its KV cache now."""
        return len(self.prompt) + self.num_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that its KV cache can ever hold."""
        return len(self.prompt) + self.sampling.max_new_tokens

    # ---- in the coroutine of its sequence task

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        drafting: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Read the prompt and generate; `flush` delivers the events.

        Args:
            drafting: Options of `generate` for drafted tokens. Without them if the request asks
                for log-probabilities, which are those of one token a step.
        """
        sampling = self.sampling
        self._detokenizer = Detokenizer(tokenizer)
        inputs = torch.tensor([self.prompt], device=model.device)
        if sampling.prompt_logprobs:
            logits_TV = model(inputs, use_cache=False).logits[0]
            entries = prompt_logprobs(logits_TV, self.prompt, sampling.num_logprobs or 0)
            del logits_TV
            self._pending_events.append(PromptLogprobs(logprobs=entries))
        if sampling.max_new_tokens == 0:
            return
        if sampling.num_logprobs is not None:
            self._recorder = LogprobRecorder(sampling.num_logprobs)
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=make_generation_config(model, sampling),
            logits_processor=make_logits_processors(
                sampling, num_prompt=len(self.prompt), recorder=self._recorder, device=model.device
            ),
            stopping_criteria=StoppingCriteriaList([TokenListener(self.on_token)]),
            **(drafting if self._recorder is None else {}),
        )

    def on_token(self, token: int) -> bool:
        """Record one token of the answer; True if it is the last."""
        assert self._detokenizer is not None
        self.num_tokens += 1
        self.last_token_at = time.monotonic()
        self.first_token_at = self.first_token_at or self.last_token_at
        offset = self._detokenizer.num_characters
        text = ""
        if token in self.sampling.stop_token_ids:
            self._is_stopped = True
        else:
            text = self._stops.push(self._detokenizer.push(token))
            held_text = self._detokenizer.held_text
            self._is_stopped = self._stops.is_hit or self._stops.would_match(held_text)
        logprob = None if self._recorder is None else self._recorder.take(token)
        self._pending_events.append(
            TokenDelta(text=text, token=token, offset=offset, logprob=logprob)
        )
        return self._is_stopped

    # ---- in the engine thread, between two steps

    def flush(self) -> None:
        """Deliver the events since the last call."""
        if self._pending_events:
            self._deliver(self._pending_events)
            self._pending_events = []

    def complete(self) -> None:
        """End the answer after its sequence task has returned."""
        if self._detokenizer is not None:
            rest = self._stops.push(self._detokenizer.end()) + self._stops.end()
            if rest:
                self._pending_events.append(TokenDelta(text=rest, token=None))
        is_stopped = self._is_stopped or self._stops.is_hit
        reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        self._end(reason, ChoiceFinished(reason))

    def abort(self) -> None:
        """End the answer after its cancellation."""
        self._end(FinishReason.ABORT, ChoiceFinished(FinishReason.ABORT))

    def fail(self, error: RequestError) -> None:
        """End the answer in an error; events before it are still delivered."""
        self.error_code = error.code or error.kind
        self._end(FinishReason.ERROR, ChoiceFailed(error))

    def _end(self, reason: FinishReason, event: ChoiceEvent) -> None:
        self.finish_reason, self.ended_at = reason, time.monotonic()
        self._pending_events.append(event)
        self.flush()
