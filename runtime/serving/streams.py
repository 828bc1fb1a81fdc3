"""Server-sent events: an answer as it is made, and the watch over whoever listens."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.serving.answers import Answer, Heard
from runtime.serving.errors import RequestError
from runtime.serving.mailbox import ClientGone, Mailbox, Quiet

log = logging.getLogger(__name__)

PING_SECONDS = 15.0
"""Proxies close connections on which nothing comes, often after a minute."""
PING = ": ping\n\n"
DONE = "data: [DONE]\n\n"
STALL_SECONDS = 60.0
"""A client that reads nothing for so long is taken for gone."""


def as_json(value: Any) -> str:
    """Compact; only ASCII, so that nothing in it can fail to be written."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def event(value: Any) -> str:
    return f"data: {as_json(value)}\n\n"


@asynccontextmanager
async def watched(
    mailbox: Mailbox, receive: Receive, fields: dict[str, Any]
) -> AsyncIterator[None]:
    """Within, a client that disconnects is heard of in the mailbox.

    At the end all is cancelled that has not ended, and the request's line of the log gets its
    counts.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        mailbox.hang_up()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        mailbox.cancel()
        watcher.cancel()
        fields |= mailbox.usage_log


async def parts(answer: Answer, *, with_usage: bool) -> AsyncIterator[str]:
    """The events of one answer. A failure is one, too: the status has been sent long ago."""
    around, no_usage = answer.envelope.around, {"usage": None} if with_usage else {}
    try:
        async for told in answer.mailbox.events(PING_SECONDS):
            if isinstance(told, Quiet):
                yield PING
                continue
            heard = Heard()
            heard.add(told[1])
            if (part := answer.part(told[0], heard)) is not None:
                yield event(around(answer.chunk_kind, [part], **no_usage))
    except RequestError as error:
        yield event(error.body())
        yield DONE
        return
    if with_usage:
        yield event(around(answer.chunk_kind, [], usage=answer.usage()))
    yield DONE


class AnswerStream(Response):
    """Sends an answer's parts as they come; cancels it when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, *, with_usage: bool, fields: dict[str, Any]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._with_usage = with_usage
        self._fields = fields

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(self._answer.mailbox, receive, self._fields):
            try:
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                async for part in parts(self._answer, with_usage=self._with_usage):
                    await in_time(send, body(part, more=True))
                await in_time(send, body("", more=False))
            except (ClientGone, OSError):
                log.info("the client has gone: its answer is not completed")
            except TimeoutError:
                log.warning("the client reads nothing: its answer is not completed")


def body(text: str, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def in_time(send: Send, message: Message) -> None:
    async with asyncio.timeout(STALL_SECONDS):
        await send(message)
