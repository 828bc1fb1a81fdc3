"""Request bodies, through the server's own application up to the queue."""

import asyncio
import json
from functools import cache
from types import SimpleNamespace

import httpx2

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
def open_client() -> tuple[httpx2.AsyncClient, asyncio.AbstractEventLoop]:
    """A client of a service whose queue is full when a valid request arrives."""
    loaded = SimpleNamespace(info=model_info(name="tiny", aliases=frozenset()))
    service = SimpleNamespace(
        state=ServiceState.READY, is_alive=True, loaded=loaded, require_capacity=lambda: None,
        submit=submit,
    )  # fmt: skip
    config = ServeConfig(log_prompts=True, insecure=True)
    transport = httpx2.ASGITransport(create_app(service, config))
    headers = {"content-type": "application/json"}
    client = httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)
    return client, asyncio.new_event_loop()


def poster(path: str):
    """Returns a parser of bodies for one path; it raises what the application fails with."""

    def parse(data: bytes) -> None:
        client, loop = open_client()
        response = loop.run_until_complete(client.post(path, content=data))
        status, body = response.status_code, response.content
        assert status in STATUSES, (status, body)
        answer = json.loads(body)
        if status >= 400:
            error = answer["error"]
            assert set(error) in (OPENAI_ERROR, ANTHROPIC_ERROR), body
            assert len(error["message"]) < 5000, body
        else:
            assert len(body) < 1000 + 30 * len(data), body

    return parse
