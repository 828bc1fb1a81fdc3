"""One answer, told as it is generated, stopped by Ctrl-C."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from runtime.generation.chat_template import EndOfTurn
from runtime.generation.detokenizer import Detokenizer, StopStringMatcher
from runtime.hf.tokens import eos_token_ids
from runtime.serving.choice import Listener


@dataclass
class ChatAnswer:
    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    """From asking to the last token."""
    first_token_seconds: float | None = None
    ended: bool = False
    """The model ended it, and neither its length nor Ctrl-C."""
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token, whose time is the prompt's."""
        if self.first_token_seconds is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / (self.seconds - self.first_token_seconds)


class ChatGenerator:
    """Generates with one model; `tell` hears each piece of text as soon as it is whole."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_of_turn: EndOfTurn,
        temperature: float,
        top_p: float,
        tell: Callable[[str], None],
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
                # Left out, it would be 50 for models whose makers recommend none.
                "top_k": model.generation_config.top_k or 0,
            }
        self._tell = tell

    def answer(self, prompt: list[int], *, max_new_tokens: int) -> ChatAnswer:
        """Generate the answer to a prompt, and report its text as it grows.

        Raises:
            TransferError: bytes of an expert did not arrive; the model serves on.
        """
        said, pieces = ChatAnswer(), Detokenizer(self._tokenizer)
        stops = StopStringMatcher(self._strings)
        start = time.perf_counter()

        def hear(token: int) -> bool:
            said.num_tokens += 1
            said.seconds = time.perf_counter() - start
            said.first_token_seconds = said.first_token_seconds or said.seconds
            if token in self._end_ids:
                said.ended = True
            else:
                self._add(said, stops.push(pieces.push(token)))
                said.ended = stops.is_hit
            return said.ended

        inputs = torch.tensor([prompt], device=self._model.device)
        end_ids = sorted(self._end_ids) or None
        try:
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                eos_token_id=end_ids,
                pad_token_id=end_ids[0] if end_ids else 0,
                stopping_criteria=StoppingCriteriaList([Listener(hear)]),
                **self._sampling,
            )
        except KeyboardInterrupt:
            said.interrupted = True
        if not stops.is_hit:
            self._add(said, stops.push(pieces.end()) + stops.end())
        return said

    def _add(self, said: ChatAnswer, text: str) -> None:
        if text:
            said.text += text
            self._tell(text)
