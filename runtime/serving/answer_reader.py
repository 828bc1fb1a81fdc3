"""Reads the events of one choice: what is new in its answer, and which tokens wrote it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.generation.sampling import TokenLogprob
from runtime.serving.choice import (
    ChoiceEvent,
    ChoiceFinished,
    FinishReason,
    PromptLogprobs,
    TokenDelta,
)


@dataclass(kw_only=True)
class OutputDelta:
    """What is new in one choice's answer."""

    text: str = ""
    tokens: list[TokenDelta] = field(default_factory=list)
    """The tokens of this text, if they have log-probabilities."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_logprobs(self) -> int:
        return len(self.prompt_logprobs) + len(self.tokens)


class AnswerReader:
    """Text is new once it cannot become a stop string; its tokens come with it.

    Tokens that ended the answer, or became part of a stop string, are not in the text.
    """

    def __init__(self) -> None:
        self._held: deque[TokenDelta] = deque()
        """Tokens whose text has not come, and may never."""
        self._num_characters = 0

    def read(self, events: Sequence[ChoiceEvent]) -> OutputDelta:
        """Return what these events add."""
        output = OutputDelta()
        pieces = []
        for event in events:
            if isinstance(event, TokenDelta):
                pieces.append(event.text)
                if event.logprob is not None:
                    self._held.append(event)
            elif isinstance(event, PromptLogprobs):
                output.prompt_logprobs = event.logprobs
            elif isinstance(event, ChoiceFinished):
                output.finish_reason = event.reason
        output.text = "".join(pieces)
        self._num_characters += len(output.text)
        while self._held and self._held[0].offset < self._num_characters:
            output.tokens.append(self._held.popleft())
        return output
