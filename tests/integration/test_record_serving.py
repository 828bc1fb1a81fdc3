"""`moecast serve record=FOLDER`, a training on what it recorded, and a server with its result."""

import json
import signal
from pathlib import Path

import httpx2
import pytest

from benchmarks.serving.server import ServerProcess, run_server
from collect.traces import Trace
from configs.cli import main
from configs.commands import RUNTIME, TRAIN
from tests.builders.recordable import recordable
from tests.builders.serving import WAIT_SECONDS

NUM_PROMPTS = 64
"""In one HTTP request: as many answers as may run and wait."""


def ask(server: ServerProcess, first_token: int) -> None:
    """Requests with equal beginnings in one go; with this many, some are held out."""
    prompts = [[first_token, 1 + i % 50, 1 + i // 3, 7] for i in range(NUM_PROMPTS)]
    body = {"prompt": prompts, "max_tokens": 5, "temperature": 0}
    answer = httpx2.post(f"{server.api}/completions", json=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text


def test_recording__trains_a_predictor_that_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recordable(tmp_path / "model", num_layers=5)
    model = {"model.id": tmp_path / "model", "model.name": "tiny"}
    recording = {**model, "record": tmp_path / "trace", "record_fraction": 1, "budget": "50%"}
    with run_server(recording, folder=tmp_path) as server:
        ask(server, 5)
        ask(server, 6)
        assert server.metrics()["moecast_recording"] == 1
        assert server.stop().exit_code == 0
    ended = json.loads((tmp_path / "run" / "results.json").read_text())
    counts = ended["recording"]
    assert (counts["num_requests"], counts["num_dropped"]) == (2 * NUM_PROMPTS, 0)
    trace = Trace.open(tmp_path / "trace")
    assert trace.num_tokens == counts["num_tokens"] == 2 * NUM_PROMPTS * (4 + 4)

    # A killed server loses what it had not written, and nothing else.
    with run_server(recording, folder=tmp_path) as server:
        ask(server, 8)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    assert Trace.open(tmp_path / "trace").digest == trace.digest

    options = [f"{key}={value}" for key, value in model.items()]
    training = [
        *(f"trace={tmp_path / 'trace'}", f"run_dir={tmp_path / 'trained'}", "figures=false"),
        *("score_shifted=false", "predictor.width=16", "max_epochs=1", "replay_tokens=10"),
    ]
    assert main("train", TRAIN, [*options, *training]) == 0
    assert "no token ids: ['token']" in capsys.readouterr().err
    assert main("train", TRAIN, ["predictor=token", *options, *training, "overwrite=true"]) == 2
    assert "needs token ids" in capsys.readouterr().err
    served = ["prompt=the fox", "budget=50%", "verify=true", f"predictor={tmp_path / 'trained'}"]
    assert main("runtime", RUNTIME, ["generate", *options, *served]) == 0
