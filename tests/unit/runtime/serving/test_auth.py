"""API keys: how they are configured and how requests present them."""

import base64

import pytest

from predictors.errors import MoecastError
from runtime.serving.config import is_loopback
from runtime.serving.edge.middleware import KEY_VARIABLE, ApiKeys, load_api_keys


def test_keys__come_from_the_option_or_its_file_before_the_environment(tmp_path):
    assert load_api_keys("a,b", {KEY_VARIABLE: "c"}) == {"a", "b"}
    assert load_api_keys(None, {KEY_VARIABLE: " c , d,"}) == {"c", "d"}
    assert load_api_keys(None, {}) == frozenset()
    path = tmp_path / "keys"
    path.write_text("first\n\n second \n")
    assert load_api_keys(f"@{path}", {}) == {"first", "second"}


@pytest.mark.parametrize("key", ["", ",", "@/nowhere", "with space", "schlüssel", "line\nbreak"])
def test_invalid_keys__are_errors(key: str) -> None:
    with pytest.raises(MoecastError):
        load_api_keys(key, {})
    with pytest.raises(MoecastError, match=KEY_VARIABLE):
        load_api_keys(None, {KEY_VARIABLE: ""})


def basic(text: bytes) -> bytes:
    return b"Basic " + base64.b64encode(text)


RIGHT = [b"Bearer one", b"bearer   two ", basic(b"anybody:one"), basic(b":two")]
WRONG = [b"Bearer one,two", b"Bearer ", b"", b"Token one", b"Basic \xff"]
WRONG += [basic(b"one"), basic(b"one:")]


@pytest.mark.parametrize("shown", RIGHT + WRONG)
def test_key__is_accepted_as_bearer_or_basic_password(shown: bytes) -> None:
    assert ApiKeys({"one", "two"}).accept(shown) is (shown in RIGHT)


def test_keys__are_kept_as_digests_only() -> None:
    assert "secret-key" not in repr(vars(ApiKeys({"secret-key"})))


LOCAL = ["localhost", "127.0.0.1", "127.8.0.1", "::1", "[::1]"]
OTHERS = ["0.0.0.0", "::", "192.168.0.1", "localhost.evil.example", "example.org", ""]


@pytest.mark.parametrize("host", LOCAL + OTHERS)
def test_is_loopback__needs_no_name_server(host: str) -> None:
    assert is_loopback(host) is (host in LOCAL)
