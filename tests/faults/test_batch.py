"""Batch runs that are killed: at any write of their results, and in the midst of generating."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.compose import compose_typed
from runtime.commands.batch import run
from tests.builders.faults.disk import ROOT
from tests.builders.models import tiny_qwen2_moe
from tests.unit.runtime.commands.test_batch import COUNT, options, results, write_prompts

pytestmark = pytest.mark.faults
DEADLINE_SECONDS = 120


@pytest.mark.usefixtures("strace")
def test_results__killed_at_any_call_lose_nothing_and_double_nothing(scenario, tmp_path):
    result = scenario("results_are_killed", folder=str(tmp_path), limit=100.0)
    assert result["kills"] > 20
    assert result["wrong"] == []


def start(folder: Path, tmp_path: Path, **more: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "runtime", "batch", *options(folder, tmp_path, **more)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MOECAST_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_batch__interrupted_carries_on_to_the_same_results(tmp_path, how):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3, num_experts=12)
    write_prompts(tmp_path / "prompts.jsonl", new_tokens=30)
    more = {"max_new_tokens": 30, "run_dir": tmp_path / "run"}
    config = compose_typed("batch", options(folder, tmp_path, **more))[0]
    config.output = tmp_path / "whole.jsonl"
    run(config)
    process = start(folder, tmp_path, **more)
    output = tmp_path / "out.jsonl"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (output.is_file() and output.read_bytes().count(b"\n") >= 4):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    if how is signal.SIGINT:
        assert process.returncode == 130, errors
        assert errors.splitlines()[-1].startswith("interrupted; the same command carries on")
    kept = output.read_bytes()
    assert kept.count(b"\n") < COUNT, "it was not interrupted in its midst"
    config.output = output
    run(config)
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert results(output) == results(tmp_path / "whole.jsonl")
