"""Batch runs that are killed: at any write of their results, and in the midst of generating."""

import os
import signal
from dataclasses import replace

import pytest

from configs.compose import compose_typed
from configs.program import run_program
from runtime.commands.batch import run
from runtime.generation.batch.result_journal import BatchResult, ResultJournal
from runtime.generation.config import BatchConfig
from tests.builders.models import tiny_qwen2_moe
from tests.unit.runtime.commands.test_batch import COUNT, options, results, write_prompts

pytestmark = pytest.mark.faults


@pytest.mark.usefixtures("strace")
def test_results__killed_at_any_call_lose_nothing_and_double_nothing(scenario, tmp_path):
    result = scenario("results_are_killed", folder=str(tmp_path), limit=400.0)
    assert result["kills"] > 20
    assert result["wrong"] == []


def test_batch__interrupted_carries_on_to_the_same_results(tmp_path, monkeypatch, capsys):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3, num_experts=12)
    write_prompts(tmp_path / "prompts.jsonl")
    monkeypatch.setenv("MOECAST_CACHE", str(tmp_path / "cache"))
    given = options(folder, tmp_path, run_dir=tmp_path / "run")
    config = compose_typed(BatchConfig, given)[0]
    run(replace(config, output=tmp_path / "whole.jsonl"))

    def append_and_interrupt(journal: ResultJournal, result: BatchResult) -> None:
        append(journal, result)
        if len(journal.done) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    append = ResultJournal.append
    with monkeypatch.context() as patch:
        patch.setattr(ResultJournal, "append", append_and_interrupt)
        assert run_program("runtime", ["batch", *given]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted; to continue: ")
    output = tmp_path / "out.jsonl"
    kept = output.read_bytes()
    assert 4 <= kept.count(b"\n") < COUNT, "it was not interrupted in its midst"
    run(replace(config, output=output))
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert results(output) == results(tmp_path / "whole.jsonl")
