"""Invalid requests get an error in OpenAI's shape that names the field at fault."""

import json
import socket
from typing import Any

import httpx2
import pytest

from tests.builders.serving import WAIT_SECONDS, RunningServer

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


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [8192]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 73}, "prompt"),
        (COMPLETIONS, {**PROMPT, "prompt": "a b " * 2000}, "prompt"),
        (COMPLETIONS, {**PROMPT, "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {**PROMPT, "max_tokens": 2048}, "max_tokens"),
        (COMPLETIONS, {**PROMPT, "max_tokens": 4097}, "max_tokens"),
        (COMPLETIONS, {**PROMPT, "max_tokens": "2"}, "max_tokens"),
        (COMPLETIONS, {**PROMPT, "max_tokens": True}, "max_tokens"),
        (COMPLETIONS, {**PROMPT, "max_tokens": 1.5}, "max_tokens"),
        (COMPLETIONS, {**PROMPT, "n": 0}, "n"),
        (COMPLETIONS, {**PROMPT, "n": 5}, "n"),
        (COMPLETIONS, {**PROMPT, "n": 10**30}, "n"),
        (COMPLETIONS, {**PROMPT, "best_of": 2}, "best_of"),
        (COMPLETIONS, {**PROMPT, "temperature": -0.1}, "temperature"),
        (COMPLETIONS, {**PROMPT, "temperature": 2.1}, "temperature"),
        (COMPLETIONS, {**PROMPT, "top_p": 1.1}, "top_p"),
        (COMPLETIONS, {**PROMPT, "min_p": -1}, "min_p"),
        (COMPLETIONS, {**PROMPT, "top_k": -2}, "top_k"),
        (COMPLETIONS, {**PROMPT, "repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETIONS, {**PROMPT, "repetition_penalty": 1e-300}, "repetition_penalty"),
        (COMPLETIONS, {**PROMPT, "presence_penalty": 3}, "presence_penalty"),
        (COMPLETIONS, {**PROMPT, "seed": 2**63}, "seed"),
        (COMPLETIONS, {**PROMPT, "stop": ["a", "b", "c", "d", "e"]}, "stop"),
        (COMPLETIONS, {**PROMPT, "stop": ""}, "stop"),
        (COMPLETIONS, {**PROMPT, "stop": [None]}, "stop"),
        (COMPLETIONS, {**PROMPT, "stop_token_ids": [8192]}, "stop_token_ids"),
        (COMPLETIONS, {**PROMPT, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {**PROMPT, "logit_bias": {"8192": 1}}, "logit_bias"),
        (COMPLETIONS, {**PROMPT, "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {**PROMPT, "logit_bias": {"-1": 1}}, "logit_bias"),
        (COMPLETIONS, {**PROMPT, "logit_bias": {"1": 101}}, "logit_bias"),
        (COMPLETIONS, {**PROMPT, "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (COMPLETIONS, {**PROMPT, "suffix": "end"}, "suffix"),
        (COMPLETIONS, {**PROMPT, "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {**PROMPT, "stream": True, "stream_options": {"x": 1}}, "stream_options"),
        (COMPLETIONS, {**PROMPT, "temprature": 1}, "temprature"),
        (COMPLETIONS, {**PROMPT, "é": 1}, "\\xe9"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
        (COMPLETIONS, {"prompt": ["\ud800"]}, "prompt"),
        (COMPLETIONS, {**PROMPT, "stop": "\udfff"}, "stop"),
        (COMPLETIONS, {**PROMPT, "model": "\udfff"}, "model"),
        (COMPLETIONS, {**PROMPT, "logit_bias": {"\udfff": 1}}, "logit_bias"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": 1}, "logprobs"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"messages": HELLO, "echo": True}, "echo"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/detokenize", {"tokens": [8192]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1] * 4096}, "tokens"),
    ],
)
def test_field_at_fault__is_named(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    with server.http() as client:
        content = json.dumps(body)
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    error = error_of(answer, 400)
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
    with server.http() as client:
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    error_of(answer, 400)


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
        body = (
            {"model": "gpt-5", "messages": HELLO} if path == CHAT else {"model": "gpt-5", **PROMPT}
        )
        error = error_of(client.post(path, json=body), 404)
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


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_content_types_of_html_forms__are_rejected(server: RunningServer, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    with server.http() as client:
        answer = client.post(COMPLETIONS, content=json.dumps(PROMPT), headers=headers)
    error_of(answer, 415)


def test_cors__grants_other_origins_nothing(server: RunningServer) -> None:
    origin = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    with server.http() as client:
        for answer in (client.options(COMPLETIONS, headers=origin), client.get("/v1/models")):
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_large_body__is_rejected_before_it_is_read(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
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

    with server.http() as client:
        answer = client.post(
            COMPLETIONS, content=chunks(), headers={"Content-Type": "application/json"}
        )
    error_of(answer, 413)


def test_body__of_the_largest_size_is_accepted(server: RunningServer) -> None:
    content = json.dumps({"prompt": "a"}).encode()
    content += b" " * ((1 << 20) - len(content))
    with server.http() as client:
        answer = client.post(
            COMPLETIONS, content=content, headers={"Content-Type": "application/json"}
        )
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
