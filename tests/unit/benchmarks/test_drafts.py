"""The benchmark of drafted tokens, on a tiny model."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.config import DraftsConfig, LookaheadConfig
from benchmarks.drafts import RIGHT_DRAFTS, run_drafts
from benchmarks.reports import command_line, read_document
from benchmarks.tables import forecasting
from tests.builders.serving import speaking_model


def test_drafts__are_measured_beside_their_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one two one two one two one"}) + "\n")
    config = DraftsConfig(
        kinds={"counting": prompts},
        model=str(speaking_model(tmp_path / "model")),
        budget="50%",
        system="on-demand",
        prompts=1,
        new_tokens=10,
        repetitions=1,
        threads=torch.get_num_threads(),
        output=tmp_path / "drafts.json",
    )
    run_drafts(config)
    report = read_document(config.output)
    (row,) = report["rows"]
    assert (row["kind"], row["prompts"], row["same_tokens"]) == ("counting", 1, 1)
    right = {row["drafted"]: row for row in report["right"]}
    assert tuple(right) == (0, *RIGHT_DRAFTS)
    assert all(row["step_seconds"] > 0 and row["speed"] > 0 for row in right.values())

    text = "\n".join(forecasting.drafts_table(report, report))
    assert "| counting | " in text
    assert text.count("\n| 8 tokens, always right | ") == 1


def test_command__names_paths_by_their_last_part() -> None:
    config = LookaheadConfig(
        traces={"docs": Path("/home/someone/traces/docs")},
        entries={"reuse": "/home/someone/entries/reuse", "regret": "qwen2-moe-tiny/reuse"},
    )
    assert command_line("lookahead", config) == (
        "python -m benchmarks lookahead traces={docs: docs} "
        "entries={reuse: reuse,regret: qwen2-moe-tiny/reuse}"
    )
