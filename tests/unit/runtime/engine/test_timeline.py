"""The timeline is a Chrome trace that adds up; without one nothing is written."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from predictors.errors import MoecastError
from runtime.engine.timeline import ChromeTraceWriter
from runtime.transfer.watched_loop import WatchedLoop
from tests.builders.served import serving

TOKENS = torch.randint(1, 64, (1, 6), generator=torch.Generator().manual_seed(5))


def test_timeline__spans_counters_and_flows(folder, tmp_path, monkeypatch):
    # Reads arrive when they are waited for, however fast they were.
    book, wait = WatchedLoop.book, WatchedLoop.wait
    monkeypatch.setattr(WatchedLoop, "book", lambda _: None)
    monkeypatch.setattr(WatchedLoop, "wait", lambda self: (wait(self), book(self)))
    path = tmp_path / "deep" / "trace.json"
    with serving(folder, budget="25%", predictor="skip", trace_events=path) as model:
        model.generate(TOKENS, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert not path.exists()
    stats = model.moecast.stats()  # prefetches go on after a generation, until the model is closed
    assert list(tmp_path.glob("deep/*.partial")) == []
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "s", "f"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    by_kind = {kind: [e for e in spans if e["cat"] == kind] for kind in {e["cat"] for e in spans}}
    assert {"fetch", "prefetch", "expert", "stall", "predict", "prefill", "decode"} <= set(by_kind)
    moved = sum(e["args"]["bytes"] for e in by_kind["fetch"] + by_kind["prefetch"])
    assert (moved, len(by_kind["expert"])) == (stats["bytes_moved"], stats["requests"])
    assert sum(e["args"]["bytes"] for e in by_kind["prefetch"]) == stats["bytes_prefetched"]
    assert len(by_kind["decode"]) == stats["num_decode_steps"] == 11
    counters = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert counters == sorted(counters)
    assert counters[-1] == moved
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert ends
    assert all(starts[number] <= ends[number] for number in ends)
    stalled = sum(event["dur"] for event in by_kind["stall"]) / 1e6
    assert abs(stalled - stats["stall_seconds"]) < 0.01


def test_timeline__tracks_do_not_overlap(folder, tmp_path):
    path = tmp_path / "trace.json"
    with serving(folder, budget="25%", host_budget="50%", trace_events=path) as model:
        model.generate(TOKENS, max_new_tokens=12, do_sample=False, pad_token_id=0)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "copy 1", "disk 1"} <= set(names.values())
    for track in names:
        spans = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track)
        for (start, duration), (following, _) in zip(spans, spans[1:], strict=False):
            assert start + duration <= following + 0.2  # microseconds; times are rounded to 0.1


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("target"),
    "partial link": lambda path: path.with_name(f"{path.name}.partial").symlink_to("target"),
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_writer__replaces_regular_files_only(kind, tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    IRREGULAR[kind](tmp_path / "trace.json")
    for path in (tmp_path / "trace.json", Path("/dev/null")):
        with pytest.raises(MoecastError, match=f"trace_events={path}: .* is not a regular file"):
            ChromeTraceWriter(path)
    for path in ("", "/"):
        with pytest.raises(MoecastError, match=f"trace_events={path}: it names no file"):
            ChromeTraceWriter(path)
    assert target.read_text() == "kept"
    assert not Path("/dev/null.partial").exists()


def test_writer__replaces_a_file_and_names_one_that_cannot_be(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("before")
    ChromeTraceWriter(path).close()
    assert "traceEvents" in json.loads(path.read_text())
    with pytest.raises(MoecastError, match=r"trace_events=.*: File exists"):
        ChromeTraceWriter(path / "below")


def test_writer__names_the_file_that_the_disk_has_no_room_for(tmp_path):
    writer = ChromeTraceWriter(tmp_path / "trace.json")
    writer._file.close()
    writer._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    message = r"trace_events=.*trace\.json: No space left.*free space"
    with pytest.raises(MoecastError, match=message):
        writer.close()
    assert writer._file.closed
    writer.close()
    assert not (tmp_path / "trace.json").exists()
