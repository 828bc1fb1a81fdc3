"""Generate a chat answer, stream its text and stop at Ctrl-C."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from runtime.generation.chat_template import EndOfTurn
from runtime.generation.detokenizer import Detokenizer, StopStringMatcher
from runtime.generation.sampling import TokenListener
from runtime.hf.model_faults import check_tokens
from runtime.hf.tokens import eos_token_ids


@dataclass
class ChatAnswer:
    """An answer and its timing."""

    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    """Seconds from the prompt to the last token."""
    first_token_seconds: float | None = None
    ended: bool = False
    """True if the model ended it, rather than the token limit or Ctrl-C."""
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> float | None:
        """Decode throughput: tokens after the first, whose time is the prefill's."""
        if self.first_token_seconds is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / (self.seconds - self.first_token_seconds)


class ChatGenerator:
    """Generates answers with one model and passes complete pieces of text to `on_text`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_of_turn: EndOfTurn,
        temperature: float,
        top_p: float,
        on_text: Callable[[str], None],
        drafting: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._strings = end_of_turn.strings
        self._end_ids = {*eos_token_ids(model), *end_of_turn.token_ids}
        self._sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            self._sampling = {
                "do_sample": True,
                "temperature": temperature,
                "top_p": top_p,
                # The default would be 50 for models whose generation config names none.
                "top_k": model.generation_config.top_k or 0,
            }
        self._on_text = on_text
        self._drafting = drafting

    def answer(self, prompt: list[int], *, max_new_tokens: int) -> ChatAnswer:
        """Generate the answer to a prompt and stream its text.

        Raises:
            CheckpointError: the prompt has a token that the model does not know.
            TransferError: bytes of an expert did not arrive; the model remains usable.
        """
        check_tokens(prompt, self._model.config)
        answer, detokenizer = ChatAnswer(), Detokenizer(self._tokenizer)
        stop_strings = StopStringMatcher(self._strings)
        start = time.perf_counter()

        def on_token(token: int) -> bool:
            answer.num_tokens += 1
            answer.seconds = time.perf_counter() - start
            answer.first_token_seconds = answer.first_token_seconds or answer.seconds
            if token in self._end_ids:
                answer.ended = True
            else:
                self._add(answer, stop_strings.push(detokenizer.push(token)))
                answer.ended = stop_strings.is_hit or stop_strings.would_match(
                    detokenizer.held_text
                )
            return answer.ended

        inputs = torch.tensor([prompt], device=self._model.device)
        end_ids = sorted(self._end_ids) or None
        try:
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                eos_token_id=end_ids,
                pad_token_id=end_ids[0] if end_ids else 0,
                stopping_criteria=StoppingCriteriaList([TokenListener(on_token)]),
                **self._sampling,
                **self._drafting,
            )
        except KeyboardInterrupt:
            answer.interrupted = True
        if not stop_strings.is_hit:
            self._add(answer, stop_strings.push(detokenizer.end()) + stop_strings.end())
        return answer

    def _add(self, answer: ChatAnswer, text: str) -> None:
        if text:
            answer.text += text
            self._on_text(text)
