"""Responses of OpenAI's API, whole or in chunks, from an output stream's events.

JSON is compact and in ASCII, which can always be encoded; large lists are written piece by piece.
An iterator is a list whose items are made while it is written, so that few exist at a time.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from runtime.generation.detokenizer import Detokenizer, Vocabulary
from runtime.generation.sampling import TokenLogprob
from runtime.serving.answers.answer_parser import OutputDelta, ToolCall
from runtime.serving.api.output_stream import OutputStream
from runtime.serving.api.schemas import GenerationBody
from runtime.serving.choice import ChoiceEvent
from runtime.serving.errors import RequestError
from runtime.serving.served_model import ModelInfo

BATCH_ITEMS = 64
"""Items that are encoded by one call, during which no other thread runs Python."""


def _list_items(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def to_json(value: Any) -> str:
    """Encode a small value at once."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_list_items)


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the text of `to_json` in pieces, each of which takes milliseconds at most."""
    if isinstance(value, dict):
        separator = "{"
        for name, item in value.items():
            yield f"{separator}{to_json(name)}:"
            yield from json_pieces(item)
            separator = ","
        yield "}" if value else "{}"
    elif isinstance(value, Iterator):
        separator = "["
        while batch := list(islice(value, BATCH_ITEMS)):
            yield separator + to_json(batch)[1:-1]
            separator = ","
        yield "]" if separator == "," else "[]"
    elif isinstance(value, list):
        separator = "["
        for item in value:
            yield separator
            yield from json_pieces(item)
            separator = ","
        yield "]" if value else "[]"
    else:
        yield to_json(value)


def write_json(value: Any) -> bytes:
    """Encode a large value; other threads run between its pieces."""
    return "".join(json_pieces(value)).encode()


MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express (OpenAI's API reference), and NaN."""


class ResponseBuilder(ABC):
    """JSON of one request's response: dictionaries, whose long lists are made when written."""

    answers: str
    """The key of the answers in a whole response."""
    last_line: str = "data: [DONE]\n\n"
    """Line that ends a stream, after its last event."""

    def __init__(self, stream: OutputStream, info: ModelInfo, body: Any, *, id: str):
        self.stream = stream
        self._info = info
        self._body = body
        self._id = id
        self._created = int(time.time())
        self._readers = [stream.request.reader() for _ in stream.choices]

    def read(self, index: int, events: Sequence[ChoiceEvent]) -> OutputDelta:
        """News in one choice."""
        return self._readers[index].read(events)

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The response, when all choices have ended.

        Raises:
            RequestError: a choice failed.
            ClientDisconnected: the client went.
        """

    def start(self) -> Iterable[dict[str, Any]]:
        """The events before the first token."""
        return ()

    @abstractmethod
    def events(self, index: int, output: OutputDelta) -> Iterable[dict[str, Any]]:
        """The events with new output of one choice; each is sent before the next is made."""

    def end(self) -> Iterable[dict[str, Any]]:
        """The events after all choices have ended."""
        return ()

    def failure(self, error: RequestError) -> Iterable[dict[str, Any]]:
        """The events of an error, which ends the stream."""
        return [error.body()]

    def _usage(self) -> dict[str, Any]:
        usage = self.stream.usage()
        details = {"cached_tokens": self.stream.count_reused()}
        return usage | {"total_tokens": sum(usage.values()), "prompt_tokens_details": details}


class ChoicesResponse(ResponseBuilder):
    """A response whose answers are choices, or deltas of them."""

    answers = "choices"
    kind: str
    chunk_kind: str
    """`object` of a whole response, and of a chunk."""

    def __init__(self, stream: OutputStream, info: ModelInfo, body: GenerationBody, *, id: str):
        super().__init__(stream, info, body, id=id)
        self._vocabulary = Vocabulary(info.tokenizer)
        self._num_calls = [0] * len(stream.choices)
        self._started: set[int] = set()
        """Choices that had a chunk."""

    async def whole(self) -> dict[str, Any]:
        events: list[list[ChoiceEvent]] = [[] for _ in self.stream.choices]
        async for item in self.stream.events():
            assert item is not None
            index, new = item
            events[index] += new
        choices = [
            self.choice(index, self.read(index, events[index])) for index in range(len(events))
        ]
        return self._object(self.kind, choices, usage=self._usage())

    def events(self, index: int, output: OutputDelta) -> Iterable[dict[str, Any]]:
        """A chunk, or two, or none yet.

        The reason of the end has one of its own: many clients drop the text of the last one.
        """
        is_first = index not in self._started
        self._started.add(index)
        end, output.finish_reason = OutputDelta(finish_reason=output.finish_reason), None
        if is_first or output.has_content:
            yield self._chunk(self.choice_delta(index, output, is_first=is_first))
        if end.finish_reason is not None:
            yield self._chunk(self.choice_delta(index, end, is_first=False))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        more = {"usage": None} if self._body.includes_usage else {}
        return self._object(self.chunk_kind, [choice], **more)

    def end(self) -> Iterable[dict[str, Any]]:
        if self._body.includes_usage:
            yield self._object(self.chunk_kind, [], usage=self._usage())

    @abstractmethod
    def choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        """An entry of a whole response's `choices`."""

    @abstractmethod
    def choice_delta(self, index: int, output: OutputDelta, *, is_first: bool) -> dict[str, Any]:
        """An entry of a chunk's `choices`."""

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._info.name,
            "choices": choices,
            **more,
        }

    @property
    def _wants_logprobs(self) -> bool:
        return self.stream.request.prompts[0].sampling.num_logprobs is not None


class CompletionResponse(ChoicesResponse):
    """Responses of /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        return self.choice_delta(index, output, is_first=True)

    def choice_delta(self, index: int, output: OutputDelta, *, is_first: bool) -> dict[str, Any]:
        request = self.stream.request
        echoed = request.prompts[index // request.num_choices].echoed
        return {
            "index": index,
            "text": echoed * is_first + output.text,
            "logprobs": self._logprobs(output, len(echoed)),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, output: OutputDelta, answer_start: int) -> dict[str, Any] | None:
        """Parallel lists over tokens, each token with its offset in the text.

        Args:
            answer_start: offset at which the answer begins, after the echoed prompt.
        """
        if not self._wants_logprobs or not (output.tokens or output.prompt_logprobs):
            return None
        entries = [*output.prompt_logprobs]
        entries += [delta.logprob for delta in output.tokens if delta.logprob is not None]
        return {
            "tokens": (self._vocabulary.text(entry.token) for entry in entries),
            "token_logprobs": (finite_logprob(entry.logprob) for entry in entries),
            "top_logprobs": map(self._top_logprobs, entries),
            "text_offset": self._text_offsets(output, answer_start),
        }

    def _text_offsets(self, output: OutputDelta, answer_start: int) -> Iterator[int]:
        """The offset of each token with log-probabilities."""
        tokenizer = self._info.tokenizer
        detokenizer = Detokenizer(tokenizer, shown_ids=tokenizer.all_special_ids)
        for entry in output.prompt_logprobs:
            yield detokenizer.num_characters
            detokenizer.push(entry.token)
        for delta in output.tokens:
            if delta.logprob is not None:
                yield answer_start + delta.offset

    def _top_logprobs(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        """The most likely tokens by text, including the token itself; None without a prediction.

        Of tokens with the same text, the most likely one counts.
        """
        if entry.logprob is None:
            return None
        logprobs: dict[str, float | None] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            logprobs.setdefault(self._vocabulary.text(token), finite_logprob(logprob))
        return logprobs


class ChatResponse(ChoicesResponse):
    """Responses of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(output),
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
        }

    def _message(self, output: OutputDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["tool_calls"] = [describe_call(call) for call in output.calls]
            message["content"] = output.text or None
        return message

    def choice_delta(self, index: int, output: OutputDelta, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if output.text or (is_first and not (output.reasoning or output.calls)):
            delta["content"] = output.text
        if output.reasoning:
            delta["reasoning_content"] = output.reasoning
        if output.calls:
            first = self._num_calls[index]
            self._num_calls[index] += len(output.calls)
            delta["tool_calls"] = [
                {"index": number, **describe_call(call)}
                for number, call in enumerate(output.calls, first)
            ]
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, output: OutputDelta) -> dict[str, Any] | None:
        """A list with one object for each token."""
        if not self._wants_logprobs or not output.tokens:
            return None
        entries = [delta.logprob for delta in output.tokens if delta.logprob is not None]
        return {"content": map(self._content_entry, entries), "refusal": None}

    def _content_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token_logprob(token, logprob) for token, logprob in entry.top]
        return self._token_logprob(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token_logprob(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._vocabulary.text(token),
            "logprob": finite_logprob(logprob),
            "bytes": self._vocabulary.bytes(token),
        }


def describe_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def finite_logprob(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
