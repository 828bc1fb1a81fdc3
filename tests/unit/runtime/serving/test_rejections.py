"""Invalid requests get an error in OpenAI's shape that names the field at fault."""

import json
from typing import Any

import httpx2
import pytest

from tests.builders.serving import RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = {"prompt": "The heart", "max_tokens": 2}


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """The error; checks that the body has OpenAI's shape and no other fields."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


WRONG_VALUES: dict[str, dict[str, list[Any]]] = {
    COMPLETIONS: {
        "prompt": [
            *("", [], [[]], [8192], [-1], [2**70], [True], [1.5], ["a", 1], None, {"a": 1}),
            *(["a"] * 73, "a b " * 2000, "\ud800", ["\ud800"]),
        ],
        "max_tokens": [-1, 2048, 4097, "2", True, 1.5],
        "n": [0, 5, 10**30],
        "best_of": [2],
        "temperature": [-0.1, 2.1],
        "top_p": [1.1],
        "min_p": [-1],
        "top_k": [-2],
        "repetition_penalty": [0, 1e-300],
        "presence_penalty": [3],
        "seed": [2**63],
        "stop": [["a", "b", "c", "d", "e"], "", [None], "\udfff"],
        "stop_token_ids": [[8192]],
        "logprobs": [21],
        "logit_bias": [{key: 1} for key in ("8192", "x", "-1", "9" * 5000, "\udfff")]
        + [{"1": 101}],
        "suffix": ["end"],
        "stream_options": [{"include_usage": True}],
        "temprature": [1],
        "model": ["\udfff"],
    },
    CHAT: {
        "messages": [
            *([], [{}], [{"role": "user", "content": 1}], [{"role": "user", "content": "\ud800"}]),
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        ],
        "max_tokens": [0],
        "top_logprobs": [1],
        "logprobs": [1],
        "tools": [[{"type": "function"}]],
        "response_format": [{"type": "json_object"}],
        "modalities": [["text", "audio"]],
        "echo": [True],
    },
    "/detokenize": {"tokens": [[8192], "x", [1] * 4096]},
}
VALID = {COMPLETIONS: PROMPT, CHAT: {"messages": HELLO}, "/detokenize": {}}
WRONG_BODIES: list[tuple[str, dict[str, Any], str]] = [
    *(
        (path, {**VALID[path], param: value}, param)
        for path, fields in WRONG_VALUES.items()
        for param, values in fields.items()
        for value in values
    ),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {**PROMPT, "stream": True, "stream_options": {"x": 1}}, "stream_options"),
    (COMPLETIONS, {**PROMPT, "é": 1}, "\\xe9"),
    (CHAT, {}, "messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
]


def post(
    server: RunningServer, path: str, content: Any, kind: str = "application/json"
) -> httpx2.Response:
    with server.http() as client:
        return client.post(path, content=content, headers={"Content-Type": kind} if kind else {})


@pytest.mark.parametrize(("path", "body", "param"), WRONG_BODIES)
def test_field_at_fault__is_named(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(post(server, path, json.dumps(body)), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"NaN",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "seed": 1e400}',
        b'{"prompt": "a", "\\ud800": 1}',
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_malformed_body__is_400(server: RunningServer, path: str, content: bytes) -> None:
    error_of(post(server, path, content), 400)


def test_context_too_long__has_openais_error_code(server: RunningServer) -> None:
    with server.http() as client:
        error = error_of(client.post(COMPLETIONS, json={"prompt": [1] * 2048}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
        messages = [{"role": "user", "content": "word " * 3000}]
        error = error_of(client.post(CHAT, json={"messages": messages}), 400)
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_model__is_404_and_names_the_served_one(server: RunningServer, path: str) -> None:
    with server.http() as client:
        error = error_of(client.post(path, json={"model": "gpt-5", **VALID[path]}), 404)
        assert error["code"] == "model_not_found"
        assert "tiny" in error["message"]
        assert error_of(client.get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"


def test_unknown_path_and_method__are_errors_in_openais_shape(server: RunningServer) -> None:
    with server.http() as client:
        error_of(client.get("/v2/anything"), 404)
        answer = client.get(COMPLETIONS)
        error_of(answer, 405)
        assert answer.headers["allow"] == "POST"


def test_docs__are_not_served(server: RunningServer) -> None:
    with server.http() as client:
        for path in ("/docs", "/redoc"):
            error_of(client.get(path), 404)
        described = client.get("/openapi.json").json()
    assert described["info"]["title"] == "moecast"
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        answers = described["paths"][path]["post"]["responses"]
        assert set(answers) == {"200", "default"}  # 400 instead of FastAPI's 422
        shape = answers["default"]["content"]["application/json"]["schema"]["$ref"]
        assert shape.endswith("/ErrorResponse")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_content_types_of_html_forms__are_rejected(server: RunningServer, kind: str) -> None:
    error_of(post(server, COMPLETIONS, json.dumps(PROMPT), kind), 415)


def test_cors__grants_other_origins_nothing(server: RunningServer) -> None:
    origin = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    with server.http() as client:
        for answer in (client.options(COMPLETIONS, headers=origin), client.get("/v1/models")):
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_large_body__is_rejected_before_it_is_read(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1048577\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_large_body__in_chunks_is_rejected(server: RunningServer) -> None:
    def chunks() -> Any:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * 65536
        yield b'"}'

    error_of(post(server, COMPLETIONS, chunks()), 413)


def test_body__of_the_largest_size_is_accepted(server: RunningServer) -> None:
    content = json.dumps({"prompt": "a"}).encode()
    content += b" " * ((1 << 20) - len(content))
    answer = post(server, COMPLETIONS, content)
    assert answer.status_code == 200, answer.text


def test_request_id__is_returned_if_it_is_safe_to_log(server: RunningServer) -> None:
    with server.http() as client:
        assert (
            client.get("/health", headers={"X-Request-Id": "a-1"}).headers["x-request-id"] == "a-1"
        )
        for forged in ("a b", "x" * 129, '"', "é"):
            headers = client.get("/health", headers={"X-Request-Id": forged.encode()}).headers
            assert headers["x-request-id"] != forged
            assert len(headers["x-request-id"]) == 32
        headers = client.post(CHAT, json={}, headers={"X-Request-Id": "b"}).headers
        assert headers["x-request-id"] == "b"


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"tools": None, "functions": None, "logit_bias": None, "stop": None, "n": None},
        {"reasoning_effort": "low", "parallel_tool_calls": False, "prompt_cache_key": "x"},
        {"logit_bias": {}, "stop": [], "frequency_penalty": 0, "model": "tiny"},
    ],
)
def test_ignored_fields__are_accepted(server: RunningServer, harmless: dict[str, Any]) -> None:
    with server.http() as client:
        answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **harmless})
    assert answer.status_code == 200, answer.text
