"""Invalid requests get an error in OpenAI's shape that names the field at fault."""

import json
import re
from typing import Any

import httpx2
import pytest

from tests.builders.serving import RunningServer
from tests.unit.runtime.serving.test_completions import CHAT, COMPLETIONS, HELLO, raw, user
from tests.unit.runtime.serving.test_connections import post as request_bytes

PROMPT = {"prompt": "The heart", "max_tokens": 2}
JSON = "application/json"


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """The error; checks that the body has OpenAI's shape and no other fields."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == JSON
    ((name, error),) = answer.json().items()
    assert (name, set(error)) == ("error", {"message", "type", "param", "code"})
    assert error["message"]
    return error


WRONG_VALUES: dict[str, dict[str, list[Any]]] = {
    COMPLETIONS: {
        "prompt": [
            *("", [], [[]], [8192], [-1], [2**70], [True], [1.5], ["a", 1], None, {"a": 1}),
            *(["a"] * 73, "a b " * 2000, "\ud800", ["\ud800"]),
        ],
        "max_tokens": [1.5],
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
        "logit_bias": [{k: 1} for k in ("8192", "x", "-1", "9" * 5000, "\udfff")],
        "suffix": ["end"],
        "stream_options": [{"include_usage": True}],
        "model": ["\udfff"],
    },
    CHAT: {
        "messages": [
            *([], [{}], user(1), user("\ud800"), user([{"type": "image_url", "image_url": {}}])),
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        ],
        "max_tokens": [0],
        "top_logprobs": [1],
        "logprobs": [1],
        "tools": [[{"type": "function"}]],
        "response_format": [{"type": "xml"}, {"type": "json_schema"}, {"json_schema": {}}],
        "structured_outputs": [{"regex": "("}, {}, {"regex": "a", "choice": ["b"]}],
        "modalities": [["text", "audio"]],
        "echo": [True],
    },
    "/detokenize": {"tokens": [[8192], "x", [1] * 4096]},
}
VALID = {COMPLETIONS: PROMPT, CHAT: {"messages": HELLO}, "/detokenize": {}}
WRONG_BODIES: list[tuple[str, dict[str, Any], str]] = [
    (path, {**VALID[path], param: value}, param)
    for path, fields in WRONG_VALUES.items()
    for param, values in fields.items()
    for value in values
]
WRONG_BODIES += [(COMPLETIONS, {**PROMPT, "é": 1}, "\\xe9"), (CHAT, {}, "messages")]
WRONG_BODIES += [("/tokenize", body, "prompt") for body in ({}, {"prompt": "a", "messages": HELLO})]


def post(server: RunningServer, path: str, content: Any, kind: str = JSON) -> httpx2.Response:
    return server.post(path, content=content, headers={"Content-Type": kind} if kind else {})


def refused(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    """The error of a request, whose message begins with the field at fault."""
    error = error_of(post(server, path, json.dumps(body)), 400)
    param = error["param"]
    assert error["message"].startswith((f"{param}: ", f"{param}="))
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("path", "body", "param"), WRONG_BODIES)
def test_field_at_fault__is_named(server, path, body, param):
    assert re.split(r"[.\[]", refused(server, path, **body)["param"])[0] == param


TEXT_PART = {"type": "text", "text": "a"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "a"}}
AUDIO_PART: dict[str, Any] = {"type": "input_audio", "input_audio": {}}
DEEP: dict[str, Any] = {
    "messages[1].content[0].image_url": HELLO + user([IMAGE_PART]),
    "messages[0].content[1].input_audio": user([TEXT_PART, AUDIO_PART]),
    "messages[0].content[0].type": user([{"type": "file"}]),
    "messages[0].content[0].text": user([{"type": "text"}]),
    "messages[0].content[0].colour": user([{**TEXT_PART, "colour": 1}]),
    "messages[1].colour": HELLO + user("a", colour=1),
    "messages[0].role": [{"role": "banana", "content": "a"}],
    "messages[0].content": user(None),
    "messages[1].content": [*HELLO, {"role": "system"}],
    "messages[2].content": HELLO + HELLO + user([]),
    "messages[0].audio": [{"role": "assistant", "content": "a", "audio": {"id": "1"}}],
}


@pytest.mark.parametrize("path", DEEP)
def test_field_of_a_message__is_named_by_its_path(server: RunningServer, path: str) -> None:
    assert refused(server, CHAT, messages=DEEP[path])["param"] == path


IN_WORDS = {
    "prompt: it is empty; give at least one item": {"prompt": []},
    "prompt: is required": {},
    "prompt: it has half a surrogate pair, which is no character": {"prompt": "\ud800"},
    "temprature: unknown field": {**PROMPT, "temprature": 1},
    "stream_options.x: unknown field": {**PROMPT, "stream": True, "stream_options": {"x": 1}},
    "max_tokens: must be at least 0; got -1": {**PROMPT, "max_tokens": -1},
    "max_tokens: must be a whole number; got '2'": {**PROMPT, "max_tokens": "2"},
    "max_tokens: must be a whole number; got true": {**PROMPT, "max_tokens": True},
    "stream: must be true or false; got 1": {**PROMPT, "stream": 1},
    "logit_bias.1: must be at most 100; got 101": {**PROMPT, "logit_bias": {"1": 101}},
    "stop[1]: must be a text; got 1": {**PROMPT, "stop": ["a", 1]},
    "stop: must be a text or a list; got 1": {**PROMPT, "stop": 1},
    "stream_options: must be an object; got 'all'": {**PROMPT, "stream_options": "all"},
}


@pytest.mark.parametrize("message", IN_WORDS)
def test_message__is_in_words_about_json(server: RunningServer, message: str) -> None:
    assert refused(server, COMPLETIONS, **IN_WORDS[message])["message"] == message


def test_body__that_is_no_object_says_so(server: RunningServer) -> None:
    assert error_of(post(server, CHAT, "[]"), 400)["message"] == "the body: must be an object"
    error = error_of(post(server, CHAT, '{"messages": }'), 400)
    assert error["message"] == "the body: it is not valid JSON: Expecting value (character 13)"
    error = error_of(post(server, CHAT, b'{"prompt": "\xff"}'), 400)
    assert "can't decode byte 0xff in position 12" in error["message"]


MALFORMED = [
    *(b"", b"{", b"null", b"[]", b'"text"', b"NaN", b"\xff\xfe", b'{"prompt": "\xff"}'),
    *(b"[" * 100_000, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"),
    *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}'),
    *(b'{"prompt": "a", "seed": 1e400}', b'{"prompt": "a", "\\ud800": 1}'),
]


@pytest.mark.parametrize("content", MALFORMED)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_malformed_body__is_400(server: RunningServer, path: str, content: bytes) -> None:
    error_of(post(server, path, content), 400)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_model__is_404_and_names_the_served_one(server: RunningServer, path: str) -> None:
    error = error_of(server.post(path, json={"model": "gpt-5", **VALID[path]}), 404)
    assert error["code"] == "model_not_found"
    assert "tiny" in error["message"]
    assert error_of(server.get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models//", "/health/"])
def test_superfluous_slashes__and_head_are_answered(server: RunningServer, path: str) -> None:
    whole, head = (server.ask(method, server.url + path) for method in ("GET", "HEAD"))
    assert whole.content
    assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert server.ask("HEAD", CHAT).status_code == 405


@pytest.mark.parametrize("path", [f"{CHAT}/", f"/{CHAT}", "/v1//chat/completions"])
def test_superfluous_slashes__keep_the_body(server: RunningServer, path: str) -> None:
    raw(server, server.url + path, messages=HELLO, max_tokens=1)


def test_unknown_path_and_method__are_errors_in_openais_shape(server: RunningServer) -> None:
    error_of(server.get("/v2/anything"), 404)
    said = "GET /chat/completions: Not Found; this server has POST .* with the model 'tiny'"
    assert re.fullmatch(said, error_of(server.get("/chat/completions"), 404)["message"])
    answer = server.get(COMPLETIONS)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_docs__are_not_served(server: RunningServer) -> None:
    for path in ("/docs", "/redoc"):
        error_of(server.get(path), 404)
    described = server.get("/openapi.json").json()
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
    for answer in (server.ask("OPTIONS", COMPLETIONS, headers=origin), server.get("/v1/models")):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_body__of_the_largest_size_is_accepted_and_no_larger_one(server: RunningServer) -> None:
    answer = post(server, COMPLETIONS, json.dumps({"prompt": "a"}).ljust(1 << 20))
    assert answer.status_code == 200, answer.text
    error_of(post(server, COMPLETIONS, (b"a" * 65536 for _ in range(20))), 413)  # in chunks
    # One that announces its size is refused before it is read.
    with server.connect(request_bytes(COMPLETIONS, b"", length=(1 << 20) + 1)) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_request_id__is_returned_if_it_is_safe_to_log(server: RunningServer) -> None:
    assert server.get("/health", headers={"X-Request-Id": "a-1"}).headers["x-request-id"] == "a-1"
    for forged in ("a b", "x" * 129, '"', "é"):
        headers = server.get("/health", headers={"X-Request-Id": forged.encode()}).headers
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert server.post(CHAT, json={}, headers={"X-Request-Id": "b"}).headers["x-request-id"] == "b"


HARMLESS = [
    {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
    {"tools": None, "functions": None, "logit_bias": None, "stop": None, "n": None},
    {"reasoning_effort": "low", "parallel_tool_calls": False, "prompt_cache_key": "x"},
    {"logit_bias": {}, "stop": [], "frequency_penalty": 0, "model": "tiny"},
    {"truncate_prompt_tokens": None, "cache_control": {"type": "ephemeral"}, "unheard": None},
    {"skip_special_tokens": True, "length_penalty": 1.0, "use_beam_search": False},
]


@pytest.mark.parametrize("harmless", HARMLESS)
def test_ignored_fields__are_accepted(server: RunningServer, harmless: dict[str, Any]) -> None:
    raw(server, CHAT, messages=HELLO, max_tokens=1, **harmless)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages"])
def test_whole_numbers__may_be_written_as_floats(server: RunningServer, path: str) -> None:
    """As data frames do with a column that has gaps."""
    prompt = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": HELLO}
    more = {} if path == "/v1/messages" else {"seed": 3.0, "n": 1.0, "logprobs": None}
    raw(server, path, model="tiny", **prompt, max_tokens=2.0, **more)
