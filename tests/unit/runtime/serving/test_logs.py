"""Each log line is JSON with time and event, and without keys."""

import io
import json
import logging
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.serving.logs import REDACTED, JsonFormatter, configure_json_logging, utc_timestamp

KEY = "sk-secret-1"


@pytest.fixture
def stream() -> io.StringIO:
    """The log of this test."""
    written = io.StringIO()
    configure_json_logging(secrets=[KEY, KEY + "0"], stream=written)
    return written


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_log_line__has_time_event_and_fields(stream: io.StringIO) -> None:
    before = datetime.now(UTC)
    logging.getLogger("a.b").info(
        "request", extra={"fields": {"request_id": "r-1", "status": 200, "code": None}}
    )
    (line,) = lines(stream)
    at = datetime.fromisoformat(line.pop("time"))
    assert abs(at - before) < timedelta(minutes=5)
    assert line == {
        "level": "info",
        "logger": "a.b",
        "event": "request",
        "request_id": "r-1",
        "status": 200,
    }


def test_utc_timestamp__has_milliseconds() -> None:
    assert utc_timestamp(0.0416) == "1970-01-01T00:00:00.041Z"


def test_exception__is_part_of_its_log_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        logging.getLogger("x").exception("it failed")
    (line,) = lines(stream)
    assert line["event"] == "it failed"
    assert "RuntimeError: two\nlines" in line["error"]


def test_log_lines_of_libraries__are_json_and_written_once(stream: io.StringIO) -> None:
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.addHandler(logging.StreamHandler(io.StringIO()))
    configure_json_logging(stream=stream)
    uvicorn.error("Exception in ASGI application")
    logging.getLogger("uvicorn").warning("100%% %s", "odd\u2028text")
    assert [line["event"] for line in lines(stream)] == [
        "Exception in ASGI application",
        "100% odd\u2028text",
    ]


def test_values_without_json_form__are_logged_as_text(stream: io.StringIO) -> None:
    logging.getLogger("x").info("kept", extra={"fields": {"path": io, "at": {1, 2}}})
    (line,) = lines(stream)
    assert "module 'io'" in line["path"]


@pytest.mark.parametrize("key", [KEY, KEY + "0"])
def test_key__is_redacted_wherever_it_is_logged(stream: io.StringIO, key: str) -> None:
    log = logging.getLogger("x")
    log.info("Bearer %s", key, extra={"fields": {"headers": {"authorization": [f"Bearer {key}"]}}})
    log.info("x", extra={"fields": {key: (key, {"a": key.encode()})}})
    try:
        raise RuntimeError(f"refused {key}")
    except RuntimeError:
        log.exception("failed with %r", {"key": key})
    text = stream.getvalue()
    assert KEY not in text
    assert text.count(REDACTED) >= 6
    assert len(lines(stream)) == 3


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(KEY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(message=st.text(), value=VALUES)
@settings(max_examples=100, deadline=None)
def test_log_line__is_json_on_one_line_without_the_key(message: str, value) -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s %s", (message, KEY), None)
    record.fields = {"value": value, "text": message}
    line = JsonFormatter(secrets=[KEY]).format(record)
    assert "\n" not in line
    assert KEY not in line
    assert json.loads(line)["level"] == "info"
