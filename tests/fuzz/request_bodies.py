"""Request bodies, through the server's own application up to the queue."""

import asyncio
import json
from functools import cache
from types import SimpleNamespace

from starlette.types import ASGIApp, Message

from runtime.serving.app import create_app
from runtime.serving.config import ServeConfig
from runtime.serving.errors import QueueFull
from runtime.serving.service import ServiceState
from tests.builders.plain_answers import model_info

STATUSES = {200, 400, 404, 413, 429}
"""200 of /tokenize and /detokenize; 429 of valid requests for answers, as the queue is full."""
OPENAI_ERROR = {"message", "type", "param", "code"}
ANTHROPIC_ERROR = {"message", "type"}


def submit(_choices: object) -> None:
    raise QueueFull("the queue is full")


@cache
def open_app() -> tuple[ASGIApp, asyncio.AbstractEventLoop]:
    """The application of a service whose queue is full when a valid request arrives."""
    loaded = SimpleNamespace(info=model_info(name="tiny", aliases=frozenset()))
    service = SimpleNamespace(
        state=ServiceState.READY, is_alive=True, loaded=loaded, require_capacity=lambda: None,
        submit=submit,
    )  # fmt: skip
    config = ServeConfig(log_prompts=True, insecure=True)
    return create_app(service, config), asyncio.new_event_loop()


async def post(app: ASGIApp, path: str, data: bytes) -> tuple[int, bytes]:
    """Returns status and body of the answer."""
    sent: list[Message] = []
    received = iter([{"type": "http.request", "body": data, "more_body": False}])

    async def receive() -> Message:
        return next(received, {"type": "http.disconnect"})

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict = {"type": "http", "http_version": "1.1", "method": "POST"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope["state"] = {"request_id": "1", "log": {}}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def poster(path: str):
    """Returns a parser of bodies for one path; it raises what the application fails with."""

    def parse(data: bytes) -> None:
        app, loop = open_app()
        status, body = loop.run_until_complete(post(app, path, data))
        assert status in STATUSES, (status, body)
        answer = json.loads(body)
        if status >= 400:
            error = answer["error"]
            assert set(error) in (OPENAI_ERROR, ANTHROPIC_ERROR), body
            assert len(error["message"]) < 5000, body
        else:
            assert len(body) < 1000 + 30 * len(data), body

    return parse
