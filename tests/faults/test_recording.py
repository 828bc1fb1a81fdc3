"""A server whose disk fills up while it records prompts."""

import json

import httpx2
import pytest

from tests.builders.forked import run_server
from tests.builders.recordable import recordable
from tests.builders.serving import WAIT_SECONDS
from tests.faults.conftest import mount_small_disk

pytestmark = pytest.mark.faults
NUM_PROMPTS, NUM_TOKENS = 16, 400
"""Of one HTTP request: more than the disk has room for."""


def test_full_disk__ends_the_recording_and_nothing_else(tmp_path):
    recordable(tmp_path / "model", num_layers=2)
    body = {"prompt": [[1 + i, *[7] * NUM_TOKENS] for i in range(NUM_PROMPTS)], "max_tokens": 1}
    with mount_small_disk(tmp_path / "disk", size="16k") as disk:
        file = disk / "served.jsonl"
        options = {"model.id": tmp_path / "model", "record": file, "record_fraction": 1}
        with run_server(options, folder=tmp_path) as server:
            for _ in range(3):
                answer = httpx2.post(f"{server.api}/completions", json=body, timeout=WAIT_SECONDS)
                assert answer.status_code == 200, answer.text
            assert server.stop().exit_code == 0
            log = server.log.read_text()
        assert log.count("No space left on device") == log.count("serving goes on") == 1
        assert '"level": "error"' not in log
        ended = json.loads((tmp_path / "run" / "results.json").read_text())["recording"]
        lines = file.read_text().splitlines()
        assert len(lines) == ended["num_requests"] > 0
        assert all(len(json.loads(line)["tokens"]) == 1 + NUM_TOKENS for line in lines)
        assert ended["is_active"] is False
