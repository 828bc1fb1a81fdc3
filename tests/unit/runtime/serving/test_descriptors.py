"""A server without a free file descriptor answers on the connections that it has."""

import gc
import json
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import psutil

from runtime.serving.edge.connections import MIN_CONNECTIONS, SPARE_FILES, connection_limit
from tests.builders.serving import running_server, tiny

PROMPT = {"prompt": "The heart", "max_tokens": 4, "temperature": 0}
SAMPLED = {"temperature": 1, "n": 2, "top_p": 0.9, "top_k": 9, "logit_bias": {"5": 1}}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
ANSWERED: list[tuple[str, dict[str, object] | None, int]] = [
    ("/v1/completions", PROMPT, 200),
    ("/v1/completions", {**PROMPT, "stream": True}, 200),
    ("/v1/completions", {**PROMPT, "echo": True, "logprobs": 2, **SAMPLED}, 200),
    ("/v1/completions", {"prompt": 1}, 400),
    ("/v1/chat/completions", CHAT, 200),
    ("/tokenize", {"prompt": "a"}, 200),
    ("/openapi.json", None, 200),
    ("/unknown", None, 404),
    ("/health", None, 200),
]


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    largest = max(int(path.name) for path in Path("/dev/fd").iterdir())
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (largest + 1, hard))
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        yield


def ask(connection: HTTPConnection, path: str, body: dict[str, object] | None) -> tuple[int, bytes]:
    content = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, content, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_no_free_descriptor__ends_neither_server_nor_engine(folder: Path) -> None:
    with (
        running_server(lambda: tiny(folder)) as server,
        closing(HTTPConnection(server.url.removeprefix("http://"))) as connection,
    ):
        assert ask(connection, "/health", None)[0] == 200  # and connects
        with no_free_descriptor():
            assert connection_limit() == MIN_CONNECTIONS
            status, content = ask(connection, "/v1/completions", PROMPT)
            assert (status, json.loads(content)["error"]["code"]) == (500, "expert_transfer_failed")
        assert ask(connection, "/v1/completions", PROMPT)[0] == 200
        # From now on the model's files are open.
        with no_free_descriptor():
            statuses = [ask(connection, path, body)[0] for path, body, _ in ANSWERED]
        assert statuses == [status for _, _, status in ANSWERED]
        assert server.service.is_alive


def test_connection_limit__follows_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # closes now what earlier tests have left
    used = psutil.Process().num_fds()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + SPARE_FILES + 100, hard))
        assert connection_limit() in range(95, 101)
        assert connection_limit(num_connections=3) in range(98, 104)
        assert connection_limit(reserved=0.5) in range(45, 51)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
        assert connection_limit() == MIN_CONNECTIONS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
