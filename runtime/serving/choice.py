"""One of a request's n answers: runs the model's own `generate` and reports each token."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runtime.generation.answer import Answer, FinishReason, TokenDelta
from runtime.generation.prefix_cache import RunningText
from runtime.generation.sampling import (
    LogprobRecorder,
    SamplingParams,
    TokenLogprob,
    make_generation_config,
    make_logits_processors,
    prompt_logprobs,
)
from runtime.serving.errors import RequestError


@contextmanager
def reading_prompt_logits(
    model: PreTrainedModel, take: Callable[[Tensor], None]
) -> Iterator[dict[str, Any]]:
    """Within the context, `take` gets the logits TV of this coroutine's first forward pass.

    Yields the options that `generate` needs for it, which has the logits of the last token only.
    Asked for all, the output layer's product of the last row may differ in its last bits from the
    product of that row alone: the row is replaced by the latter, so that the answer is that of a
    request without log-probabilities. Other coroutines may use the model meanwhile.
    """
    own, is_read = getcurrent(), False
    head = model.get_output_embeddings() if model._supports_logits_to_keep() else None

    def is_prompt() -> bool:
        return not is_read and getcurrent() is own

    def keep_last_row(module: nn.Module, inputs: tuple[Tensor, ...], logits_BTV: Tensor) -> None:
        if is_prompt() and logits_BTV.shape[1] > 1:
            logits_BTV[:, -1:] = module.forward(inputs[0][:, -1:])

    def read(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal is_read
        if is_prompt():
            is_read = True
            take(output.logits[0])

    with ExitStack() as hooks:
        if head is not None:
            hooks.callback(head.register_forward_hook(keep_last_row).remove)
        hooks.callback(model.register_forward_hook(read).remove)
        yield {} if head is None else {"logits_to_keep": 0}


ChoiceEvent = TokenDelta | list[TokenLogprob] | FinishReason | RequestError
"""A token, the log-probabilities of the prompt's tokens, or the end: its reason, or an error."""


class CompletionChoice(Answer):
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
        self._pending_events: list[ChoiceEvent] = []
        num_logprobs = sampling.num_logprobs
        recorder = None if num_logprobs is None else LogprobRecorder(num_logprobs)
        super().__init__(
            self._pending_events.append,
            stop=sampling.stop,
            end_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            shown_ids=sampling.shown_token_ids,
            recorder=recorder,
            constraint=None if sampling.grammar is None else sampling.grammar.begin(),
        )
        self.prompt = prompt
        self.sampling = sampling
        self.request_id = request_id
        self._deliver_events = deliver
        self.num_reused = 0
        """Tokens of the prompt that were not computed, as an earlier text begins with them."""
        self._text: RunningText | None = None
        self.is_cancelled = False
        self.arrived_at = time.monotonic()
        self.ended_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error_code: str | None = None
        """Code or kind of the error that ended it. The error itself would keep frames alive."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in its KV cache now."""
        return len(self.prompt) + self.num_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that its KV cache can ever hold."""
        return len(self.prompt) + self.sampling.max_new_tokens

    @property
    def ttft_seconds(self) -> float | None:
        """Time from its arrival to its first token, in the queue too; None: it had no token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def can_reuse_prefix(self) -> bool:
        """Whether it generates, and needs no logits of the prompt but the last."""
        return self.sampling.max_new_tokens > 0 and not self.sampling.prompt_logprobs

    def begin_text(self, text: RunningText | None) -> None:
        """Go on with a KV cache."""
        self._text = text
        self.num_reused = 0 if text is None else text.num_reused

    def take_text(self) -> RunningText | None:
        """Return the KV cache of a choice that has ended."""
        text, self._text = self._text, None
        return text

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
        if sampling.max_new_tokens == 0:
            if sampling.prompt_logprobs:
                inputs = torch.tensor([self.prompt], device=model.device)
                self._score_prompt(model(inputs, use_cache=False).logits[0])
            return
        options = dict(drafting) if self._recorder is None else {}
        with ExitStack() as scoring:
            if sampling.prompt_logprobs:
                reading = reading_prompt_logits(model, self._score_prompt)
                options |= scoring.enter_context(reading)
            self.generate(
                model,
                tokenizer,
                self.prompt,
                generation_config=make_generation_config(model, sampling),
                logits_processor=make_logits_processors(
                    sampling,
                    # An encoder reads the prompt; its decoder begins with a token of its own.
                    num_prompt=1 if model.config.is_encoder_decoder else len(self.prompt),
                    recorder=self._recorder,
                    constraint=self._constraint,
                    device=model.device,
                ),
                cached=self._text,
                **options,
            )

    def _score_prompt(self, logits_TV: Tensor) -> None:
        entries = prompt_logprobs(logits_TV, self.prompt, self.sampling.num_logprobs or 0)
        self._pending_events.append(entries)

    # ---- in the engine thread, between two steps

    def flush(self) -> None:
        """Deliver the events since the last call."""
        if self._pending_events:
            self._deliver_events(self._pending_events.copy())
            self._pending_events.clear()

    def complete(self) -> None:
        """End the answer after its sequence task has returned."""
        self._end(self.end())

    def abort(self) -> None:
        """End the answer after its cancellation."""
        self._end(FinishReason.ABORT)

    def fail(self, error: RequestError) -> None:
        """End the answer in an error; events before it are still delivered."""
        self.error_code = error.code or error.kind
        self._end(FinishReason.ERROR, error)

    def _end(self, reason: FinishReason, error: RequestError | None = None) -> None:
        self.finish_reason, self.ended_at = reason, time.monotonic()
        self._pending_events.append(reason if error is None else error)
        self.flush()
