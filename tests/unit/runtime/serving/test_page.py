"""The status page's files: a strict policy, and names that stay text."""

import re

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from runtime.serving.api.routes import PAGE_FILES, add_status_routes

POLICY = [
    *("base-uri 'none'", "connect-src 'self'", "default-src 'none'", "form-action 'none'"),
    *("frame-ancestors 'none'", "img-src data:", "require-trusted-types-for 'script'"),
    *("script-src 'self'", "style-src 'self'", "trusted-types 'none'"),
]
MARKUP = r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|Function\(|DOMParser"


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    add_status_routes(app, dict, lambda: (b"", "text/plain"))
    return TestClient(app)


@pytest.mark.parametrize("path", PAGE_FILES)
def test_page__has_a_strict_policy(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert sorted(map(str.strip, headers["content-security-policy"].split(";"))) == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", PAGE_FILES)
def test_page__loads_nothing_from_other_hosts(client: TestClient, path: str) -> None:
    """The only addresses are SVG's namespace and a comment's."""
    named = set(re.findall(r"https?://[^\s\"'`]*", client.get(path).text))
    assert named <= {"http://www.w3.org/2000/svg", "http://:KEY@host/)"}


def test_page__has_no_inline_code(client: TestClient) -> None:
    page = client.get("/").text
    assert re.findall(r"<script[^>]*>(?!</script>)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []


def test_script__makes_no_markup_of_names(client: TestClient) -> None:
    script = client.get("/page.js").text
    assert re.findall(MARKUP, script) == []
    # The browser's tests try what this expression replaces.
    assert "JSON.parse(await response.text(), readableName)" in script
