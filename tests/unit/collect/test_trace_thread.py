"""The thread that writes recorded requests: bounds of memory and of disk, and failures."""

import errno
import logging
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from collect.errors import TraceError
from collect.served.trace_thread import TraceThread
from collect.traces import Trace
from tests.builders.growing import make_request, open_growing

RESERVED = 1000


def finish(thread: TraceThread, number: int) -> None:
    assert thread.reserve(RESERVED)
    thread.finish(partial(make_request, number), reserved_bytes=RESERVED)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released after each write."""
    ended = threading.Semaphore(0)
    write = TraceThread._write

    def write_and_tell(thread, requests):
        write(thread, requests)
        ended.release()

    monkeypatch.setattr(TraceThread, "_write", write_and_tell)
    return ended


def test_thread__writes_all_when_it_is_closed(tmp_path: Path) -> None:
    thread = TraceThread(open_growing(tmp_path), max_bytes=1 << 30)
    for number in range(5):
        finish(thread, number)
    thread.close()
    counts, trace = thread.counts(), Trace.open(tmp_path)
    assert (counts.num_requests, counts.num_dropped) == (5, 0)
    assert counts.num_tokens == trace.num_tokens == sum(make_request(i).num_rows for i in range(5))
    assert not counts.is_active
    open_growing(tmp_path)  # no longer locked


def test_thread__writes_a_full_shard_at_once_and_others_in_time(
    tmp_path: Path, written: threading.Semaphore
) -> None:
    full = TraceThread(open_growing(tmp_path / "full"), max_bytes=1 << 30, shard_bytes=2 * RESERVED)
    finish(full, 0)
    finish(full, 1)
    assert written.acquire(timeout=240)
    late = TraceThread(open_growing(tmp_path / "late"), max_bytes=1 << 30, shard_seconds=0.01)
    finish(late, 0)
    assert written.acquire(timeout=240)
    for thread in (full, late):
        thread.close()
    assert len(Trace.open(tmp_path / "full").request_table) == 2
    assert len(Trace.open(tmp_path / "late").request_table) == 1


def test_thread__without_memory_drops_and_counts(tmp_path: Path) -> None:
    thread = TraceThread(
        open_growing(tmp_path), max_bytes=1 << 30, memory_bytes=2 * RESERVED, shard_bytes=1 << 30
    )
    assert thread.reserve(RESERVED)
    assert thread.reserve(RESERVED)
    assert not thread.reserve(RESERVED)
    assert thread.counts().num_dropped == 1
    thread.cancel(RESERVED)
    assert thread.reserve(RESERVED)
    thread.close()


def test_thread__ends_at_the_size_of_the_trace_until_the_folder_is_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: threading.Semaphore
) -> None:
    reference = open_growing(tmp_path / "reference")
    reference.add([make_request(0), make_request(1)])
    max_bytes = reference.num_bytes + 20_000
    thread = TraceThread(
        open_growing(tmp_path / "now"), max_bytes=max_bytes, shard_bytes=50 * RESERVED
    )
    for number in range(50):
        finish(thread, number)
    assert written.acquire(timeout=240)
    counts = thread.counts()
    assert 0 < counts.num_requests < 50
    assert counts.num_requests + counts.num_dropped == 50
    assert not counts.is_active
    files = [path.stat().st_size for path in (tmp_path / "now").glob("0*")]
    assert sum(files) == counts.num_bytes <= max_bytes
    assert not thread.reserve(RESERVED)
    assert len([one for one in caplog.records if "no longer recorded" in one.message]) == 1
    (tmp_path / "now").rename(tmp_path / "before")
    finish(thread, 50)
    thread.close()
    assert len(Trace.open(tmp_path / "before").request_table) == counts.num_requests
    assert len(Trace.open(tmp_path / "now").request_table) == 1


def test_thread__on_a_full_disk_ends_with_one_line_and_keeps_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TraceThread(open_growing(tmp_path), max_bytes=1 << 30)
    finish(first, 0)
    first.close()

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    second = TraceThread(open_growing(tmp_path), max_bytes=1 << 30)
    finish(second, 1)
    finish(second, 2)
    monkeypatch.setattr(os, "fsync", fail)
    second.close()
    monkeypatch.undo()
    counts = second.counts()
    assert (counts.num_requests, counts.num_dropped) == (0, 2)
    assert not counts.is_active
    assert not second.reserve(RESERVED)
    lines = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "No space left" in lines[0]
    assert "serving goes on" in lines[0]
    assert len(Trace.open(tmp_path).request_table) == 1
    assert not list(tmp_path.glob(".*.tmp"))


def test_thread__that_has_failed_drops_requests_that_began_before(tmp_path: Path) -> None:
    thread = TraceThread(open_growing(tmp_path), max_bytes=1 << 30)
    assert thread.reserve(RESERVED)
    thread.fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    thread.finish(partial(make_request, 0), reserved_bytes=RESERVED)
    assert thread.counts().num_dropped == 1
    thread.close()
    assert (thread.counts().num_requests, thread.counts().num_dropped) == (0, 1)
    assert not list(tmp_path.glob("*.arrow"))


def test_thread__drops_a_request_with_a_value_that_cannot_be_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def overflow():
        raise TraceError("gate_input of layer 1 contains 70000.0")

    thread = TraceThread(open_growing(tmp_path), max_bytes=1 << 30)
    for rows in (overflow, partial(make_request, 0), overflow):
        assert thread.reserve(RESERVED)
        thread.finish(rows, reserved_bytes=RESERVED)
    thread.close()
    assert (thread.counts().num_requests, thread.counts().num_dropped) == (1, 2)
    assert [one.message for one in caplog.records if one.levelno == logging.WARNING] == [
        "a request was not recorded: gate_input of layer 1 contains 70000.0"
    ]
    assert len(Trace.open(tmp_path).request_table) == 1
