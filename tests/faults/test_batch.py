"""Batch runs that are killed: at any write of their results, and in the midst of generating."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from configs.compose import compose_typed
from runtime.commands.batch import run
from runtime.generation.config import BatchConfig
from tests.builders.faults.disk import ROOT
from tests.builders.models import tiny_qwen2_moe
from tests.unit.runtime.commands.test_batch import COUNT, options, results, write_prompts

pytestmark = pytest.mark.faults
WAIT_SECONDS = 240


@pytest.mark.usefixtures("strace")
def test_results__killed_at_any_call_lose_nothing_and_double_nothing(scenario, tmp_path):
    result = scenario("results_are_killed", folder=str(tmp_path), limit=400.0)
    assert result["kills"] > 20
    assert result["wrong"] == []


PAUSED = """
import runpy, sys
from runtime.generation.batch.result_journal import ResultJournal
append = ResultJournal.append
def pause_after_four(journal, result):
    append(journal, result)
    if len(journal.done) == 4:
        print("PAUSED", flush=True)
        sys.stdin.read()
ResultJournal.append = pause_after_four
runpy.run_module("runtime", run_name="__main__")
"""
"""`python -m runtime`, in which batch mode waits once it has written four results."""


def test_batch__interrupted_carries_on_to_the_same_results(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3, num_experts=12)
    write_prompts(tmp_path / "prompts.jsonl", new_tokens=30)
    more = {"max_new_tokens": 30, "run_dir": tmp_path / "run"}
    config = compose_typed(BatchConfig, options(folder, tmp_path, **more))[0]
    run(replace(config, output=tmp_path / "whole.jsonl"))
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSED, "batch", *options(folder, tmp_path, **more)], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MOECAST_CACHE": str(tmp_path / "cache")},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    output = tmp_path / "out.jsonl"
    if not any(line == "PAUSED\n" for line in process.stdout):
        pytest.fail(process.communicate()[1])
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("interrupted; to continue: ")
    kept = output.read_bytes()
    assert 4 <= kept.count(b"\n") < COUNT, "it was not interrupted in its midst"
    run(replace(config, output=output))
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert results(output) == results(tmp_path / "whole.jsonl")
