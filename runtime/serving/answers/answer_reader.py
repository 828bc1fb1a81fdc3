"""Reads the events of one choice: what is new in its answer, and which tokens wrote it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.generation.sampling import TokenLogprob
from runtime.serving.answers.answer_parser import AnswerParser, AnswerPiece, ToolCall
from runtime.serving.choice import (
    ChoiceEvent,
    ChoiceFinished,
    FinishReason,
    PromptLogprobs,
    TokenDelta,
)


@dataclass(kw_only=True)
class OutputDelta:
    """News in one choice's answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenDelta] = field(default_factory=list)
    """The tokens of the text, if they have log-probabilities."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def has_content(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.num_logprobs)

    @property
    def num_logprobs(self) -> int:
        return len(self.prompt_logprobs) + len(self.tokens)


class AnswerReader:
    """Text is new once it cannot become a stop string; its tokens come with it.

    Tokens that ended the answer, or became part of a stop string, are not in the text.

    Args:
        parser: takes the answer apart; None: all of it is content.
        max_calls: most tool calls that are reported.
    """

    def __init__(self, parser: AnswerParser | None = None, *, max_calls: int | None = None):
        self._parser = parser
        self._max_calls = max_calls
        self._num_calls = 0
        self._held: deque[TokenDelta] = deque()
        """Tokens whose text has not come, and may never."""
        self._num_characters = 0
        """Characters of the answer as the model wrote it."""

    def read(self, events: Sequence[ChoiceEvent]) -> OutputDelta:
        """Return what these events add."""
        output = OutputDelta()
        for event in events:
            if isinstance(event, TokenDelta):
                if event.logprob is not None:
                    self._held.append(event)
                self._add(output, self._parse(event.text))
            elif isinstance(event, PromptLogprobs):
                output.prompt_logprobs = event.logprobs
            elif isinstance(event, ChoiceFinished):
                if self._parser is not None:
                    self._add(output, self._parser.end())
                is_call = self._num_calls and event.reason is FinishReason.STOP
                output.finish_reason = FinishReason.TOOL_CALLS if is_call else event.reason
        return output

    def _parse(self, text: str) -> list[AnswerPiece]:
        start = self._num_characters
        self._num_characters += len(text)
        if self._parser is not None:
            return self._parser.push(text)
        return [AnswerPiece(text, start)] if text else []

    def _add(self, output: OutputDelta, pieces: list[AnswerPiece]) -> None:
        for piece in pieces:
            if piece.call is not None:
                if self._max_calls is None or self._num_calls < self._max_calls:
                    output.calls.append(piece.call)
                    self._num_calls += 1
            elif piece.is_reasoning:
                output.reasoning += piece.text
            else:
                output.text += piece.text
                output.tokens += self._take_tokens(piece.start, piece.start + len(piece.text))

    def _take_tokens(self, start: int, end: int) -> list[TokenDelta]:
        """The tokens of a piece of content; those of what was left out before it are dropped."""
        tokens = []
        while self._held and self._held[0].offset < end:
            token = self._held.popleft()
            next_offset = self._held[0].offset if self._held else self._num_characters
            if max(next_offset, token.offset + 1) > start:
                tokens.append(token)
        return tokens
