"""SIGTERM while a server is generating, and a server with few descriptors."""

import json
import socket
from contextlib import ExitStack

import httpx2

from tests.builders.forked import run_server
from tests.builders.open_files import limit_open_files
from tests.builders.server_load import RequestEnd, accepted_requests, late_requests

GRACE_SECONDS = 300
"""Enough for all answers on a busy machine."""


def test_sigterm__with_grace_finishes_requests_among_idle_clients(speaking) -> None:
    with ExitStack() as stack:
        with limit_open_files(256):  # as macOS does
            options = {"model.id": speaking, "grace": GRACE_SECONDS}
            started = stack.enter_context(run_server(options))
        host, port = started.url.removeprefix("http://").split(":")
        # One client is connected before the idle ones, another one after them.
        first = stack.enter_context(httpx2.Client(base_url=started.url, timeout=60))
        assert first.get("/health").status_code == 200
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port))))
        body = {"prompt": "The", "max_tokens": 2}
        with httpx2.Client(base_url=started.url, timeout=60) as second:
            # Connections are accepted in order: those that are shed for others are closed by now.
            assert second.get("/health").status_code == 200
            for client in (first, second):
                assert client.post("/v1/completions", json=body).status_code == 200
        assert started.footprint().descriptors < 256
        with accepted_requests(started, 12, tokens=120) as requests, late_requests(started) as late:
            ended = started.stop(timeout_seconds=GRACE_SECONDS + 10)
        lines = started.log.read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines if line.startswith("{")]
    assert sum("too many connections" in event for event in events) == 1
    assert not any("could be accepted" in event for event in events)
    assert (ended.exit_code, ended.children_left) == (0, 0)
    assert [request.result() for request in requests] == [RequestEnd(200, 120)] * 12
    assert late[503] > late[200] == 0
