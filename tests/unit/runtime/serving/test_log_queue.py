"""Logging never waits for the reader of the log; dropped lines are counted."""

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.serving.logs import DroppingHandler, JsonFormatter

PIPE_BYTES = 4096
"""The smallest pipe, which a few lines fill."""
SECONDS = 30.0


@contextmanager
def piped_log(*, max_chars: int = 10_000) -> Iterator[tuple[logging.Logger, DroppingHandler, int]]:
    """A logger that writes to a small pipe, its handler, and the end to read."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    handler = DroppingHandler(writes, max_chars=max_chars)
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
    with piped_log(max_chars=1 << 20) as (log, handler, reads):
        for number in range(50):
            log.info("%d", number, extra={"fields": {"text": "x" * (number % 7) * 1000}})
        lines = read_lines(reads, "49")
        assert [line["event"] for line in lines] == [str(number) for number in range(50)]
        assert handler.num_dropped == 0


def test_pipe_that_nobody_reads__drops_lines_and_counts_them() -> None:
    with piped_log() as (log, handler, reads):
        start = time.monotonic()
        for number in range(1000):
            log.info("%d", number)
        handler.flush()
        assert time.monotonic() - start < SECONDS
        assert handler.num_dropped > 500
        content = b""
        while content.count(b"\n") < 1000 - handler.num_dropped:
            content += os.read(reads, 1 << 16)
        kept = [int(json.loads(line)["event"]) for line in content.splitlines()]
        assert kept == sorted(kept)
        log.info("again")
        assert [line["event"] for line in read_lines(reads, "again")] == ["again"]


def test_record_without_text__harms_nobody() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s", (Broken(),), None)
    with piped_log() as (log, handler, reads):
        handler.handle(record)
        log.info("next")
        assert [line["event"] for line in read_lines(reads, "next")] == ["next"]
        assert handler.num_dropped == 1


def test_process__ends_although_nobody_reads_its_log() -> None:
    reads, writes = os.pipe()
    code = """
import logging, sys
from runtime.serving.logs import configure_json_logging
configure_json_logging()
for number in range(3000):
    logging.info("%d %s", number, "x" * 100)
print("done", flush=True)
"""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stderr=writes, stdout=subprocess.PIPE, timeout=SECONDS
        )
    finally:
        os.close(reads)
        os.close(writes)
    assert (done.returncode, done.stdout) == (0, b"done\n")
