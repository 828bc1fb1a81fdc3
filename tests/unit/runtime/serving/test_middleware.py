"""Authentication, host check, body limits and the request log."""

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.testclient import TestClient

from runtime.serving.app import create_app
from runtime.serving.config import ServeConfig
from runtime.serving.edge.middleware import OPEN_PATHS
from runtime.serving.logs import configure_json_logging
from runtime.serving.observe.status import Telemetry
from runtime.serving.service import GenerationService
from tests.builders.serving import running_server, tiny
from tests.builders.waiting import wait_for
from tests.unit.runtime.serving.test_connections import exchange, post
from tests.unit.runtime.serving.test_rejections import error_of

KEYS = frozenset({"first-key", "second-key"})


def application(keys: frozenset[str] = frozenset(), **options: Any) -> tuple[FastAPI, TestClient]:
    """The whole application with its middleware; the model is not loaded."""
    service = GenerationService(pytest.fail, max_running=1, max_waiting=1)
    config = ServeConfig(**options)
    app = create_app(service, config, keys=keys, telemetry=Telemetry(service, config))
    return app, TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def list_endpoints(app: FastAPI) -> list[tuple[str, str]]:
    """Every method of every route, and unknown paths."""
    endpoints = [("POST", "/health/more"), *(("GET", p) for p in ("/none", "/health/", "//health"))]
    for route in routes_of(app.routes):
        path = re.sub(r"{name(:path)?}", "tiny", route.path)
        methods = (route.methods or {"GET"}) | {"OPTIONS", "DELETE"}
        endpoints += [(method, path) for method in methods]
    return endpoints


def routes_of(routes: Any) -> Iterator[Route]:
    """All routes, including those of included routers, which FastAPI nests."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        else:
            yield from routes_of(getattr(route, "routes", None) or route.original_router.routes)


def test_key__is_required_on_all_but_two_paths() -> None:
    app, client = application(keys=KEYS)
    endpoints = list_endpoints(app)
    assert {path for _, path in endpoints} >= {
        *("/health", "/ready", "/version", "/metrics", "/", "/status", "/openapi.json"),
        *("/tokenize", "/detokenize", "/v1/models", "/v1/models/tiny"),
        *("/v1/completions", "/v1/chat/completions"),
    }
    for method, path in endpoints:
        for headers in ({}, {"Authorization": "Bearer third-key"}):
            answer = client.request(method, path, headers=headers)
            if path.rstrip("/") in OPEN_PATHS:
                assert answer.status_code in (200, 405, 503), (method, path)
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"].startswith("Basic")
            if method != "HEAD":
                error = answer.json()["error"]
                # Anthropic's have a type only.
                code = error.get("code", error["type"])
                assert code in ("invalid_api_key", "authentication_error"), (method, path)
                assert "third-key" not in answer.text
        answer = client.request(method, path, headers={"Authorization": "Bearer second-key"})
        assert answer.status_code != 401, (method, path)


def test_body__is_read_only_after_authentication() -> None:
    _, client = application(keys=KEYS)
    assert client.post("/v1/completions", content=b"x" * (2 << 20)).status_code == 401


LOCAL = ["localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"]
OTHERS = ["elsewhere.example", "127.0.0.1.elsewhere.example:8000", "192.168.1.1"]


@pytest.mark.parametrize("host", LOCAL + OTHERS)
def test_host_check__rejects_other_host_names_without_a_key(host: str) -> None:
    """A web page whose name resolves to this machine shares the server's origin (DNS rebinding)."""
    for insecure, status in ((False, 200 if host in LOCAL else 403), (True, 200)):
        _, client = application(insecure=insecure)
        assert client.get("/version", headers={"Host": host}).status_code == status


def test_slow_body__times_out(folder):
    with running_server(lambda: tiny(folder), ready=False, body_seconds=0.2) as server:
        answer = exchange(server, post("/tokenize", b"{", length=10))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer


@pytest.mark.parametrize("log_prompts", [False, True])
def test_log__has_ids_and_counts_and_prompts_only_on_request(folder, log_prompts):
    stream = io.StringIO()
    configure_json_logging(logging.StreamHandler(stream), secrets=KEYS)
    options, body = (
        {"log_prompts": log_prompts},
        {"prompt": "a very private matter", "temperature": 0},
    )
    with running_server(lambda: tiny(folder), keys=KEYS, options=options) as server:
        for number, key in enumerate(("first-key", "wrong-key")):
            headers = {"Authorization": f"Bearer {key}", "X-Request-Id": f"id-{number}"}
            with server.http(headers=headers) as client:
                for more in ({}, {"stream": True}, {"temperature": "a very private one"}):
                    client.post("/v1/completions", json={**body, **more, "max_tokens": 2})
    text = stream.getvalue()
    assert ("private matter" in text) is log_prompts
    for secret in (*KEYS, "wrong-key", "very private one"):
        assert secret not in text
    requests = [line for line in map(json.loads, text.splitlines()) if line["event"] == "request"]
    expected = [("id-0", 200)] * 2 + [("id-0", 400)] + [("id-1", 401)] * 3
    assert [(line["request_id"], line["status"]) for line in requests] == expected
    assert all(line["completion_tokens"] == 2 for line in requests[:2])
    texts = [[one["text"] for one in line.get("answers", ())] for line in requests[:2]]
    assert texts[0] == texts[1]
    assert any(texts[0]) is log_prompts
    assert all(line["seconds"] >= 0 and line["path"] == "/v1/completions" for line in requests)


def test_unexpected_exception__is_500_with_the_request_id(server, monkeypatch, caplog):
    broken = Mock(side_effect=RuntimeError("private detail"))
    monkeypatch.setattr("runtime.serving.api.routes.tokenize_body", broken)
    answer = server.post("/tokenize", json={"prompt": "a"}, headers={"X-Request-Id": "id-7"})
    assert error_of(answer, 500)["type"] == "server_error"
    assert "id-7" in answer.text
    assert "private detail" not in answer.text
    assert answer.headers["x-request-id"] == "id-7"
    # The response may arrive before the line is written.
    wait_for(lambda: "private detail" in caplog.text)
