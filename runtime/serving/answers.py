"""What a mailbox tells, put together: one answer whole, or as it is made."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.generation.detokenizer import Detokenizer
from runtime.serving.choice import Ended, Event, Piece, PromptRead, Reason
from runtime.serving.facts import Facts
from runtime.serving.mailbox import Mailbox
from runtime.serving.replies import (
    Envelope,
    chat_choice,
    chat_chunk,
    chat_logprobs,
    completion_choice,
    completion_logprobs,
    piece_offsets,
    prompt_offsets,
    usage,
)
from runtime.serving.sampling import TokenLogprob
from runtime.serving.vocabulary import Vocabulary


@dataclass(kw_only=True)
class Heard:
    """Of one choice, since the last time that it was written."""

    pieces: list[Piece] = field(default_factory=list)
    prompt: list[TokenLogprob] = field(default_factory=list)
    reason: Reason | None = None

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Piece):
                self.pieces.append(event)
            elif isinstance(event, PromptRead):
                self.prompt = event.logprobs
            elif isinstance(event, Ended):
                self.reason = event.reason

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Answer(ABC):
    """The JSON of one request's answer."""

    def __init__(self, mailbox: Mailbox, facts: Facts, envelope: Envelope):
        self.mailbox = mailbox
        self.facts = facts
        self.envelope = envelope
        self._vocabulary = Vocabulary(facts.tokenizer)
        self._begun: set[int] = set()
        """Choices of which something was written."""

    async def whole(self) -> dict[str, Any]:
        """When everything has ended.

        Raises:
            RequestError: a choice failed.
            ClientGone: nobody waits for it.
        """
        heard = [Heard() for _ in self.mailbox.choices]
        async for told in self.mailbox.events():
            assert isinstance(told, tuple)
            heard[told[0]].add(told[1])
        choices = [self.choice(index, one) for index, one in enumerate(heard)]
        return self.envelope.around(self.kind, choices, usage=self.usage())

    def usage(self) -> dict[str, int]:
        return usage(self.mailbox.num_prompt_tokens, self.mailbox.num_completion_tokens)

    def part(self, index: int, heard: Heard) -> dict[str, Any] | None:
        """A chunk with what was heard of one choice; None when there is nothing to say yet."""
        is_first = index not in self._begun
        if not (is_first or heard.text or heard.reason or self._asks_logprobs):
            return None
        self._begun.add(index)
        return self.chunk(index, heard, is_first=is_first)

    @property
    def _asks_logprobs(self) -> bool:
        return self.mailbox.order.samplings[0].num_logprobs is not None

    @property
    @abstractmethod
    def kind(self) -> str: ...

    @property
    @abstractmethod
    def chunk_kind(self) -> str: ...

    @abstractmethod
    def choice(self, index: int, heard: Heard) -> dict[str, Any]: ...

    @abstractmethod
    def chunk(self, index: int, heard: Heard, *, is_first: bool) -> dict[str, Any]: ...


class CompletionAnswer(Answer):
    kind = "text_completion"
    chunk_kind = "text_completion"

    def choice(self, index: int, heard: Heard) -> dict[str, Any]:
        return self.chunk(index, heard, is_first=True)

    def chunk(self, index: int, heard: Heard, *, is_first: bool) -> dict[str, Any]:
        prompt = self.mailbox.order.prompts[index // self.mailbox.order.num_choices]
        logprobs = None
        if self._asks_logprobs and (heard.pieces or heard.prompt):
            told = piece_offsets(heard.pieces, len(prompt.echoed))
            if heard.prompt:
                detokeniser = Detokenizer(self.facts.tokenizer, skip_special_tokens=False)
                told = prompt_offsets(heard.prompt, detokeniser) + told
            logprobs = completion_logprobs(told, self._vocabulary)
        text = prompt.echoed * is_first + heard.text
        return completion_choice(index, text, logprobs=logprobs, reason=heard.reason)


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, heard: Heard) -> dict[str, Any]:
        assert heard.reason is not None
        logprobs = self._logprobs(heard)
        return chat_choice(index, heard.text, logprobs=logprobs, reason=heard.reason)

    def chunk(self, index: int, heard: Heard, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if is_first or heard.text:
            delta["content"] = heard.text
        return chat_chunk(index, delta, logprobs=self._logprobs(heard), reason=heard.reason)

    def _logprobs(self, heard: Heard) -> dict[str, Any] | None:
        is_told = self._asks_logprobs and heard.pieces
        return chat_logprobs(heard.pieces, self._vocabulary) if is_told else None
