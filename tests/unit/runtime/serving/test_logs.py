"""Each log line is JSON without keys; logging never waits for the reader of the log."""

import fcntl
import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.serving import logs

KEY = "sk-secret-1"


@pytest.fixture
def stream() -> io.StringIO:
    """The log of this test."""
    written = io.StringIO()
    logs.configure_json_logging(logging.StreamHandler(written), secrets=[KEY, KEY + "0"])
    return written


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_log_line__has_time_event_and_fields(stream: io.StringIO) -> None:
    fields = {"request_id": "r-1", "status": 200, "code": None, "path": io}
    logging.getLogger("a.b").info("request", extra={"fields": fields})
    (line,) = lines(stream)
    assert abs(datetime.fromisoformat(line.pop("time")) - datetime.now(UTC)) < timedelta(minutes=5)
    assert "module 'io'" in line.pop("path"), "what has no form in JSON is text"
    named = {"level": "info", "logger": "a.b", "event": "request"}
    assert line == named | {"request_id": "r-1", "status": 200}


def test_utc_timestamp__has_milliseconds() -> None:
    assert logs.utc_timestamp(0.0416) == "1970-01-01T00:00:00.041Z"


def test_exception__is_part_of_its_log_line(stream: io.StringIO) -> None:
    logging.getLogger("x").error("it failed", exc_info=RuntimeError("two\nlines"))
    (line,) = lines(stream)
    assert line["event"] == "it failed"
    assert "RuntimeError: two\nlines" in line["error"]


def test_log_lines_of_libraries__are_json_and_written_once(stream: io.StringIO) -> None:
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.addHandler(logging.StreamHandler(io.StringIO()))
    logs.configure_json_logging(logging.StreamHandler(stream))
    uvicorn.error("Exception in ASGI application")
    logging.getLogger("uvicorn").warning("100%% %s", "odd\u2028text")
    events = [line["event"] for line in lines(stream)]
    assert events == ["Exception in ASGI application", "100% odd\u2028text"]


@pytest.mark.parametrize("key", [KEY, KEY + "0"])
def test_key__is_redacted_wherever_it_is_logged(stream: io.StringIO, key: str) -> None:
    log = logging.getLogger("x")
    log.info("Bearer %s", key, extra={"fields": {"headers": {"authorization": [f"Bearer {key}"]}}})
    log.info("x", extra={"fields": {key: (key, {"a": key.encode()})}})
    log.error("failed with %r", {"key": key}, exc_info=RuntimeError(f"refused {key}"))
    text = stream.getvalue()
    assert KEY not in text
    assert text.count(logs.REDACTED) >= 6
    assert len(lines(stream)) == 3


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(KEY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(message=st.text(), value=VALUES)
def test_log_line__is_json_on_one_line_without_the_key(message: str, value) -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s %s", (message, KEY), None)
    record.fields = {"value": value, "text": message}
    line = logs.JsonFormatter(secrets=[KEY]).format(record)
    assert "\n" not in line
    assert KEY not in line
    assert json.loads(line)["level"] == "info"


PIPE_BYTES = 4096
"""The smallest pipe, which a few lines fill."""
SECONDS = 30.0


@contextmanager
def pipe_log(max_chars=10_000) -> Iterator[tuple[logging.Logger, logs.DroppingHandler, BinaryIO]]:
    """A logger that writes to a small pipe, its handler, and the end to read."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    handler = logs.DroppingHandler(writes, max_chars=max_chars)
    handler.setFormatter(logs.JsonFormatter())
    log = logging.getLogger("piped")
    log.propagate, log.handlers = False, [handler]
    log.setLevel(logging.INFO)
    with os.fdopen(reads, "rb") as written, os.fdopen(writes, "wb"), closing(handler):
        yield log, handler, written


def read_event(written: BinaryIO) -> str:
    return json.loads(written.readline())["event"]


def test_lines__come_in_order_however_long_they_are() -> None:
    with pipe_log(max_chars=1 << 20) as (log, handler, written):
        for number in range(50):
            log.info("%d", number, extra={"fields": {"text": "x" * (number % 7) * 1000}})
        assert [int(read_event(written)) for _ in range(50)] == [*range(50)]
        assert handler.num_dropped == 0


def test_pipe_that_nobody_reads__drops_lines_and_counts_them() -> None:
    with pipe_log() as (log, handler, written):
        start = time.monotonic()
        for number in range(1000):
            log.info("%d", number)
        handler.flush()
        assert time.monotonic() - start < SECONDS
        assert handler.num_dropped > 500
        kept = [int(read_event(written)) for _ in range(1000 - handler.num_dropped)]
        assert kept == sorted(kept)
        log.info("again")
        assert read_event(written) == "again"


def test_record_without_text__harms_nobody() -> None:
    with pipe_log() as (log, handler, written):
        handler.handle(logging.LogRecord("x", logging.INFO, "f", 1, "%d", ("no number",), None))
        log.info("next")
        assert read_event(written) == "next"
        assert handler.num_dropped == 1


def test_process__ends_although_nobody_reads_its_log() -> None:
    reads, writes = os.pipe()
    code = """
import logging, sys
from runtime.serving.logs import DroppingHandler, configure_json_logging
configure_json_logging(DroppingHandler(sys.stderr.fileno()))
for number in range(3000):
    logging.info("%d %s", number, "x" * 100)
print("done", flush=True)
"""
    with os.fdopen(reads, "rb"), os.fdopen(writes, "wb") as unread:
        streams = {"stderr": unread, "stdout": subprocess.PIPE}
        done = subprocess.run([sys.executable, "-c", code], timeout=SECONDS, **streams)
    assert (done.returncode, done.stdout) == (0, b"done\n")
