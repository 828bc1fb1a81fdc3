"""Takes an answer apart while it is written: content, reasoning and tool calls.

`AnswerReader` reads the events of one choice: what is new, and which tokens wrote it.
"""

import json
import secrets
import string
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from runtime.generation.sampling import TokenLogprob
from runtime.serving.answers.answer_formats import CONTENT, REASONING_FIELDS, TOOL_CALLS, UNMARKED
from runtime.serving.choice import ChoiceEvent, FinishReason, TokenDelta

CONTENTS = (CONTENT, UNMARKED)
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""The form that Mistral's chat templates demand; other models take any id."""


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of content or of reasoning, or a whole call."""

    text: str = ""
    start: int = 0
    """Offset of its text in the answer as the model wrote it."""
    is_reasoning: bool = False
    call: ToolCall | None = None


class AnswerParser:
    """Spaces around marks are dropped. From a call that is none on, all is content as it is.

    Args:
        parser: finds the marks; None: there are none, all is content.
        names: the tools, where calls have no marks: a call of another one is content.
    """

    def __init__(
        self, parser: ResponseParser | None = None, *, names: Container[str] | None = None
    ):
        self._parser = parser
        self._names = names
        self._raw = ""
        self._num_read = 0
        """Characters of it that are known to be text of one field or another."""
        self._num_shown = 0
        """Characters of it that are shown, or not wanted."""
        self._held = ""
        """Spaces that are dropped if a mark follows."""
        self._is_start = False
        """Whether the next text follows a mark, after which spaces are dropped."""
        for event in () if parser is None else parser.initial_events:
            self._is_start |= event["type"] == "region_open"

    def push(self, text: str) -> list[AnswerPiece]:
        """Add text that the model wrote; return what it is."""
        self._raw += text
        if self._parser is None:
            return self._rest()
        try:
            events = self._parser.feed(text)
        except ValueError:
            return self._give_up()
        return self._pieces(events)

    def end(self) -> list[AnswerPiece]:
        """Return what is left when the answer ends."""
        if self._parser is None:
            return []
        try:
            _, events = self._parser.finalize()
        except ValueError:
            return self._give_up()
        *before, last = events or [{"type": None}]
        if last["type"] != "region_close" or last["field"] not in CONTENTS:
            return self._pieces(events)
        pieces = self._pieces(before)
        if self._held and not self._is_start:
            pieces.append(AnswerPiece(self._held, self._num_read - len(self._held)))
        return pieces

    def _pieces(self, events: list[dict[str, Any]]) -> list[AnswerPiece]:
        starts = self._locate(events)
        pieces = []
        for event, start in zip(events, starts, strict=True):
            field, kind = event["field"], event["type"]
            if kind == "region_open":
                self._held = ""
                self._is_start |= self._num_read > 0 or field in REASONING_FIELDS
            elif kind == "region_close":
                self._held, self._is_start = "", True
                if field == TOOL_CALLS:
                    if (calls := read_calls(event["value"], self._names)) is None:
                        pieces += self._give_up()
                        break
                    pieces += [AnswerPiece(call=call) for call in calls]
                if field not in CONTENTS:
                    self._num_shown = self._num_read
            else:
                self._num_read = start + len(event["text"])
                if field in (*CONTENTS, *REASONING_FIELDS):
                    text = self._trim(event["text"])
                    self._num_shown = self._num_read - len(self._held)
                    first = self._num_shown - len(text)
                    pieces.append(AnswerPiece(text, first, field in REASONING_FIELDS))
        return [piece for piece in pieces if piece.text or piece.call]

    def _trim(self, text: str) -> str:
        """Hold back the spaces at the end, and drop those after a mark."""
        text = self._held + text
        if self._is_start:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._is_start &= not kept
        return kept

    def _locate(self, events: list[dict[str, Any]]) -> list[int]:
        """Positions at which these events' texts begin, in order; marks are between them."""
        starts, end = [], len(self._raw)
        for event in reversed(events):
            if event["type"] == "region_chunk":
                end = max(self._num_read, self._raw.rfind(event["text"], self._num_read, end))
            starts.append(end)
        return starts[::-1]

    def _give_up(self) -> list[AnswerPiece]:
        """The answer cannot be read: the rest is content as it is."""
        self._parser, self._num_read = None, self._num_shown
        return self._rest()

    def _rest(self) -> list[AnswerPiece]:
        start, self._num_read = self._num_read, len(self._raw)
        return [AnswerPiece(self._raw[start:], start)] if start < len(self._raw) else []


def read_calls(value: Any, names: Container[str] | None) -> list[ToolCall] | None:
    """The calls of a region; None if one of them is none, or has another name."""
    given = value.get("function") if isinstance(value, Mapping) else value
    calls = []
    for one in given if isinstance(given, list) else [given]:
        call = read_call(one)
        if call is None or not (names is None or call.name in names):
            return None
        calls.append(call)
    return calls


def read_call(given: Any) -> ToolCall | None:
    """A call of an answer; None if it is none."""
    if isinstance(given, Mapping) and isinstance(given.get("function"), Mapping):
        given = given["function"]
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        return None
    # Llama writes `parameters`.
    arguments = given.get("arguments", given.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, Mapping):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
    return ToolCall(id, given["name"].strip(), text)


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

    Content after a call or more reasoning begins on a line of its own. Tokens that ended the
    answer, or became part of a stop string, are not in the text.

    Args:
        parser: takes the answer apart; None: one for which all of it is content.
        max_calls: most tool calls that are reported.
    """

    def __init__(self, parser: AnswerParser | None = None, *, max_calls: int | None = None):
        self._parser = parser or AnswerParser()
        self._max_calls = max_calls
        self._num_calls = 0
        self._has_content = self._is_apart = False
        """Whether there is content, and whether a call or reasoning came after it."""
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
                self._num_characters += len(event.text)
                self._add_pieces(output, self._parser.push(event.text))
            elif isinstance(event, list):
                output.prompt_logprobs = event
            elif isinstance(event, FinishReason):
                self._add_pieces(output, self._parser.end())
                is_call = self._num_calls and event is FinishReason.STOP
                output.finish_reason = FinishReason.TOOL_CALLS if is_call else event
        return output

    def _add_pieces(self, output: OutputDelta, pieces: list[AnswerPiece]) -> None:
        for piece in pieces:
            self._is_apart |= self._has_content and (piece.is_reasoning or piece.call is not None)
            if piece.call is not None:
                if self._max_calls is None or self._num_calls < self._max_calls:
                    output.calls.append(piece.call)
                    self._num_calls += 1
            elif piece.is_reasoning:
                output.reasoning += piece.text
            else:
                self._add_content(output, piece.text, piece.start)

    def _add_content(self, output: OutputDelta, text: str, start: int) -> None:
        """Add content and its tokens; those of what was left out before it are dropped."""
        output.text += "\n" * self._is_apart + text
        self._has_content, self._is_apart = True, False
        while self._held and self._held[0].offset < start + len(text):
            token = self._held.popleft()
            next_offset = self._held[0].offset if self._held else self._num_characters
            if max(next_offset, token.offset + 1) > start:
                output.tokens.append(token)
