"""One answer: it runs the model's own `generate` and tells each token as it is made."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from runtime.generation.detokenizer import Detokenizer, StopStringMatcher
from runtime.serving.errors import RequestError
from runtime.serving.processors import Recorder, processors_of, prompt_logprobs
from runtime.serving.sampling import Sampling, TokenLogprob


class Reason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended its text, or wrote a stop string."""
    LENGTH = "length"
    ABORT = "abort"
    """Nobody waits for it any more."""
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one token adds; the text may be empty, and may be what earlier tokens held back."""

    text: str
    token: int | None
    """None for text that was held back until the end."""
    offset: int = 0
    """Characters of the answer before the token's own text."""
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, kw_only=True)
class PromptRead:
    """The prompt's log-probabilities."""

    logprobs: list[TokenLogprob]


@dataclass(frozen=True)
class Ended:
    reason: Reason


@dataclass(frozen=True)
class Failed:
    error: RequestError


Event = Piece | PromptRead | Ended | Failed


class Choice:
    """Made by whoever asks; everything else is the engine thread's, which also calls `deliver`.

    Times are of `time.monotonic`, None until then.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        deliver: Callable[[list[Event]], None],
        request_id: str = "",
    ):
        self.prompt = prompt
        self.sampling = sampling
        self.request_id = request_id
        self._deliver = deliver
        self._outbox: list[Event] = []
        self.num_tokens = 0
        self.is_cancelled = False
        self.asked_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.ended_at: float | None = None
        self.reason: Reason | None = None
        self._detokeniser: Detokenizer | None = None
        self._stops = StopStringMatcher(sampling.stop)
        self._recorder: Recorder | None = None
        self._is_stopped = False

    @property
    def num_cached(self) -> int:
        """Tokens in its cache."""
        return len(self.prompt) + self.num_tokens

    @property
    def most_cached(self) -> int:
        """Tokens that will ever be."""
        return len(self.prompt) + self.sampling.max_new_tokens

    # ---- in the member's coroutine

    def run(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Reads the prompt and generates; what it tells is delivered by `flush`."""
        sampling, num_prompt = self.sampling, len(self.prompt)
        self._detokeniser = Detokenizer(tokenizer)
        inputs = torch.tensor([self.prompt], device=model.device)
        if sampling.prompt_logprobs:
            logits_TV = model(inputs, use_cache=False).logits[0]
            found = prompt_logprobs(logits_TV, self.prompt, sampling.num_logprobs or 0)
            del logits_TV
            self._outbox.append(PromptRead(logprobs=found))
        if sampling.max_new_tokens == 0:
            return
        if sampling.num_logprobs is not None:
            self._recorder = Recorder(sampling.num_logprobs)
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=generation_config(model, sampling),
            logits_processor=processors_of(
                sampling, num_prompt=num_prompt, recorder=self._recorder, device=model.device
            ),
            stopping_criteria=StoppingCriteriaList([Listener(self.hear)]),
        )

    def hear(self, token: int) -> bool:
        """One token of the answer; whether it is the last."""
        assert self._detokeniser is not None
        self.num_tokens += 1
        self.last_token_at = time.monotonic()
        self.first_token_at = self.first_token_at or self.last_token_at
        offset = self._detokeniser.num_characters
        text = ""
        if token in self.sampling.stop_token_ids:
            self._is_stopped = True
        else:
            text = self._stops.push(self._detokeniser.push(token))
            self._is_stopped = self._stops.is_hit
        logprob = None if self._recorder is None else self._recorder.take(token)
        self._outbox.append(Piece(text=text, token=token, offset=offset, logprob=logprob))
        return self._is_stopped

    # ---- in the engine thread, outside of it

    def flush(self) -> None:
        """Delivers what was told since."""
        if self._outbox:
            self._deliver(self._outbox)
            self._outbox = []

    def complete(self) -> None:
        """The member has ended by itself."""
        if self._detokeniser is not None:
            rest = self._stops.push(self._detokeniser.end()) + self._stops.end()
            if rest:
                self._outbox.append(Piece(text=rest, token=None))
        is_stopped = self._is_stopped or self._stops.is_hit
        self._end(Reason.STOP if is_stopped else Reason.LENGTH)

    def abort(self) -> None:
        """It was cancelled."""
        self._end(Reason.ABORT)

    def fail(self, error: RequestError) -> None:
        """It ended in an error; what was told before stays told."""
        self.reason, self.ended_at = Reason.ERROR, time.monotonic()
        self._outbox.append(Failed(error))
        self.flush()

    def _end(self, reason: Reason) -> None:
        self.reason, self.ended_at = reason, time.monotonic()
        self._outbox.append(Ended(reason))
        self.flush()


class Listener(StoppingCriteria):
    """Hears each token as soon as `generate` has drawn it."""

    def __init__(self, hear: Callable[[int], bool]):
        self._hear = hear

    def __call__(self, input_ids: Tensor, _scores: Any, **_more: Any) -> Tensor:
        is_last = self._hear(int(input_ids[0, -1]))
        return torch.tensor([is_last], device=input_ids.device)


def generation_config(model: PreTrainedModel, sampling: Sampling) -> GenerationConfig:
    """Everything that the request decides; the rest is the model's own.

    A value that is left out is filled in: with the model's, or with 50 for top_k. End-of-text
    tokens that shall be ignored are replaced by one that no vocabulary has.
    """
    stop_ids = sorted(sampling.stop_token_ids) or [model.config.get_text_config().vocab_size]
    drawn: dict[str, Any] = {"do_sample": False}
    if not sampling.is_greedy:
        drawn = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
        num_beams=1,
        num_return_sequences=1,
        repetition_penalty=1.0,
        return_dict_in_generate=False,
        **drawn,
    )
