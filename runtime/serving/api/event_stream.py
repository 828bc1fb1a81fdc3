"""Server-sent events: a response in chunks, cancelled when its client disconnects."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime.serving.answers.answer_parser import OutputDelta
from runtime.serving.api.output_stream import ClientDisconnected, OutputStream
from runtime.serving.api.responses import ResponseBuilder, describe_call, to_json
from runtime.serving.errors import RequestError

log = logging.getLogger(__name__)

PING_SECONDS = 15.0
"""Proxies close idle connections, often after a minute."""
PING = ": ping\n\n"
LARGE_LOGPROBS = 64
"""Tokens with log-probabilities above which a chunk is written on another thread."""


def format_event(value: dict[str, Any]) -> str:
    """An event, which has a name if it has a type: OpenAI's chunks have none."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {to_json(value)}\n\n"


@asynccontextmanager
async def cancel_on_disconnect(
    stream: OutputStream, receive: Receive, log_fields: dict[str, Any]
) -> AsyncIterator[None]:
    """Within the context, a disconnect of the client ends the stream's events.

    At its end, choices that have not ended are cancelled, and the request's log line gets its
    counts.
    """

    async def watch_connection() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.disconnect()

    watcher = asyncio.create_task(watch_connection())
    try:
        yield
    finally:
        stream.cancel()
        watcher.cancel()
        log_fields |= {"choices": len(stream.choices), **stream.usage()}


async def stream_events(
    response: ResponseBuilder, answers: list[dict[str, Any]] | None
) -> AsyncIterator[str]:
    """The server-sent events of one response.

    An error is an event too: the status has already been sent.

    Args:
        answers: gets what each choice has written, for the log; None: nobody wants it.
    """
    try:
        for event in response.start():
            yield format_event(event)
        async for item in response.stream.events(PING_SECONDS):
            if item is None:
                yield PING
                continue
            index, news = item
            output = response.read(index, news)
            if answers is not None:
                note_output(answers[index], output)
            for event in response.events(index, output):
                if output.num_logprobs > LARGE_LOGPROBS:
                    yield await asyncio.to_thread(format_event, event)
                else:
                    yield format_event(event)
        for event in response.end():
            yield format_event(event)
    except RequestError as error:
        for event in response.failure(error):
            yield format_event(event)
    if response.last_line:
        yield response.last_line


def note_output(answer: dict[str, Any], output: OutputDelta) -> None:
    """Add to an answer what is new in it."""
    calls = [describe_call(call) for call in output.calls]
    parts = {"text": output.text, "reasoning": output.reasoning, "tool_calls": calls}
    for name, new in parts.items():
        if new:
            answer[name] = answer[name] + new if name in answer else new


class EventStreamResponse(StreamingResponse):
    """Sends a response's chunks as they come; cancels the generation on a disconnect.

    A client that reads nothing is disconnected by `runtime.serving.edge.connections`.

    Args:
        response: builds the events.
        log_fields: of the request's line in the log.
        logs_answers: whether they get the answers.
    """

    media_type = "text/event-stream"

    def __init__(
        self, response: ResponseBuilder, *, log_fields: dict[str, Any], logs_answers: bool
    ):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        answers: list[dict[str, Any]] | None = None
        if logs_answers:
            answers = log_fields["answers"] = [{} for _ in response.stream.choices]
        super().__init__(stream_events(response, answers), headers=headers)
        self._stream, self._log_fields = response.stream, log_fields

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(self._stream, receive, self._log_fields):
            try:
                await self.stream_response(send)
            except (ClientDisconnected, OSError):
                log.info("the client disconnected: its generation is cancelled")
