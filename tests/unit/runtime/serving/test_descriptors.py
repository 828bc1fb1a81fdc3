"""A server without a free file descriptor answers on the connections that it has."""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import psutil

from runtime.serving.edge.connections import MIN_CONNECTIONS, SPARE_FILES, connection_limit
from tests.builders.open_files import limit_open_files
from tests.builders.serving import running_server, tiny
from tests.unit.runtime.serving.test_rejections import error_of

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
    largest = max(int(path.name) for path in Path("/dev/fd").iterdir())
    with limit_open_files(largest + 1), ExitStack() as stack:
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        yield


def test_no_free_descriptor__ends_neither_server_nor_engine(folder: Path) -> None:
    with running_server(lambda: tiny(folder)) as server, server.http(trust_env=False) as client:

        def ask(path: str, body: dict[str, object] | None = None) -> httpx2.Response:
            return client.request("GET" if body is None else "POST", path, json=body)

        assert ask("/health").status_code == 200  # and connects
        # As after a read that failed: the model's files have to be opened again.
        server.service.loaded.model.moecast.engine.store.files.close()
        with no_free_descriptor():
            assert connection_limit() == MIN_CONNECTIONS
            failed = ask("/v1/completions", PROMPT)
            assert error_of(failed, 500)["code"] == "expert_transfer_failed"
            streamed = ask("/v1/completions", {**PROMPT, "stream": True}).text
            *_, event, end = streamed.strip().split("\n\n")
            error = json.loads(event.removeprefix("data: "))["error"]
            assert (error["type"], end) == ("server_error", "data: [DONE]")
            assert "cannot read experts" in error["message"]
        assert ask("/v1/completions", PROMPT).status_code == 200
        # The model's files are open again.
        with no_free_descriptor():
            statuses = [ask(path, body).status_code for path, body, _ in ANSWERED]
        assert statuses == [status for _, _, status in ANSWERED]
        assert server.service.is_alive


def test_connection_limit__follows_the_limit_of_open_files() -> None:
    gc.collect()  # closes now what earlier tests have left
    used = psutil.Process().num_fds()
    with limit_open_files(used + SPARE_FILES + 100):
        assert connection_limit() in range(95, 101)
        assert connection_limit(num_connections=3) in range(98, 104)
        assert connection_limit(reserved=0.5) in range(45, 51)
    with limit_open_files(used + 10):
        assert connection_limit() == MIN_CONNECTIONS
