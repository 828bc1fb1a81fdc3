"""Logging never waits for the reader of the log; dropped lines are counted."""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime.serving.log_queue import QueuedHandler
from runtime.serving.logs import JsonFormatter

PIPE_BYTES = 4096
"""The smallest pipe, which a few lines fill."""
SECONDS = 30.0


@contextmanager
def piped_log(*, max_bytes: int = 10_000) -> Iterator[tuple[logging.Logger, QueuedHandler, int]]:
    """A logger that writes to a small pipe, its handler, and the end to read."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    handler = QueuedHandler(writes, max_bytes=max_bytes)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("piped")
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield log, handler, reads
    finally:
        log.removeHandler(handler)
        handler.close()
        for descriptor in (reads, writes):
            os.close(descriptor)


def read_lines(reads: int, last: str, content: bytes = b"") -> list[dict]:
    """Lines up to the one with the event `last`, after those that were read."""
    while f'"event": "{last}"'.encode() not in content or not content.endswith(b"\n"):
        content += os.read(reads, 1 << 16)
    return [json.loads(line) for line in content.splitlines()]


def test_lines__come_in_order_however_long_they_are() -> None:
    with piped_log(max_bytes=1 << 20) as (log, handler, reads):
        for number in range(50):
            log.info("%d", number, extra={"fields": {"text": "x" * (number % 7) * 1000}})
        lines = read_lines(reads, "49")
        assert [line["event"] for line in lines] == [str(number) for number in range(50)]
        assert handler.num_dropped == 0


def test_pipe_that_nobody_reads__drops_lines_and_tells_how_many() -> None:
    with piped_log() as (log, handler, reads):
        start = time.monotonic()
        for number in range(1000):
            log.info("%d", number)
        assert time.monotonic() - start < SECONDS
        assert handler.num_dropped > 500
        dropped = handler.num_dropped
        first = os.read(reads, PIPE_BYTES)
        while handler._num_bytes > 5000:  # until there is room for a line
            first += os.read(reads, PIPE_BYTES)
        log.info("again")
        lines = read_lines(reads, "again", first)
        assert sum(line.get("dropped", 0) for line in lines) == dropped == handler.num_dropped
        kept = [line["event"] for line in lines if "dropped" not in line]
        assert kept == [*map(str, range(1000 - dropped)), "again"]


def test_close__does_not_wait_for_a_reader() -> None:
    with piped_log() as (log, handler, _):
        for number in range(1000):
            log.info("%d", number)
        start = time.monotonic()
        handler.flush()
        handler.close()
        log.info("late")
        assert time.monotonic() - start < SECONDS
        assert not handler._thread.is_alive()


def test_reader_that_has_gone__costs_lines_only() -> None:
    with piped_log() as (log, handler, reads):
        os.close(reads)
        log.info("lost")
        handler.flush()
        assert handler.num_dropped == 1
        os.dup2(os.open(os.devnull, os.O_RDONLY), reads)


@pytest.mark.parametrize("length", [0, 20_000])
def test_record_without_text__is_named_and_harms_nobody(length: int) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("x" * length)

    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s", (Broken(),), None)
    with piped_log() as (log, handler, reads):
        handler.handle(record)
        log.info("next")
        lines = read_lines(reads, "next")
        assert [line["event"] for line in lines] == ["a record has no text", "next"]
        assert lines[0]["cause"] == "RuntimeError"
