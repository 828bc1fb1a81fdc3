"""A server whose disk fills up while it records requests."""

import json
import time
from pathlib import Path

import httpx2
import pytest

from benchmarks.serving.server import ServerProcess, run_server
from collect.traces import Trace
from tests.builders.recordable import recordable
from tests.builders.serving import WAIT_SECONDS
from tests.faults.conftest import mount_small_disk

pytestmark = pytest.mark.faults
NUM_PROMPTS = 64
"""In one HTTP request: as many answers as may run and wait."""
NUM_TOKENS = 60
"""Of each prompt: the rows of all prompts are more than the server writes at once, 64 MiB."""


def ask(server: ServerProcess, num_prompts: int = NUM_PROMPTS) -> list[str]:
    """Returns the answers to prompts with different beginnings."""
    prompts = [[1 + i % 50, 1 + i // 50, *[7] * (NUM_TOKENS - 2)] for i in range(num_prompts)]
    body = {"prompt": prompts, "max_tokens": 4, "temperature": 0}
    answer = httpx2.post(f"{server.api}/completions", json=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def wait_for_metrics(server: ServerProcess, expected: dict[str, float]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while expected.items() - server.metrics().items():
        assert time.monotonic() < deadline, (server.metrics(), server.log.read_text())
        time.sleep(0.05)


def test_full_disk__ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    recordable(tmp_path / "model", num_layers=4, hidden_size=512)
    with mount_small_disk(tmp_path / "disk", size="4m") as disk:
        options = {"model.id": tmp_path / "model", "model.name": "tiny", "budget": "50%"}
        options |= {"record": disk / "trace", "record_fraction": 1}
        with run_server(options, folder=tmp_path) as server:
            ask(server, 2)
            assert server.stop().exit_code == 0
        before = Trace.open(disk / "trace")
        assert len(before.request_table) == 2

        with run_server(options, folder=tmp_path) as server:
            assert server.metrics()["moecast_recording"] == 1
            answers = ask(server)
            ended = {"moecast_recording": 0, "moecast_recorded_requests": 0}
            wait_for_metrics(server, {**ended, "moecast_dropped_recordings": NUM_PROMPTS})
            assert ask(server) == answers
            wait_for_metrics(server, {**ended, "moecast_dropped_recordings": 2 * NUM_PROMPTS})
            assert server.stop().exit_code == 0
        log = server.log.read_text()
        lines = [line for line in log.splitlines() if "recording requests" in line]
        assert len(lines) == 1, log
        assert "has ended ([Errno 28] No space left on device); serving goes on" in lines[0]
        assert '"level": "error"' not in log
        recorded = json.loads((tmp_path / "run" / "results.json").read_text())["recording"]
        assert (recorded["is_active"], recorded["num_requests"]) == (False, 0)
        # What was recorded before is whole, and nothing of the rest takes room.
        assert Trace.open(disk / "trace").digest == before.digest
        assert not list((disk / "trace").glob(".*.tmp"))
        files = {path.name for path in (disk / "trace").iterdir() if path.name[0] != "."}
        assert files == {"trace.json", *(record.name for record in before.manifest.files())}
