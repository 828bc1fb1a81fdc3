"""The benchmark of prompts, on a tiny model."""

from pathlib import Path

import pytest
import torch

from benchmarks.config import PrefillConfig
from benchmarks.prefill import PrefillTimes, make_row, run_prefill
from benchmarks.reports import read_document
from benchmarks.tables import systems
from tests.builders.serving import speaking_model


def test_prefill__is_measured_beside_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = PrefillConfig(
        model=str(speaking_model(tmp_path / "model")),
        budget="50%",
        system=["on-demand", "promoe"],
        prompts=2,
        prompt_tokens=40,
        threads=torch.get_num_threads(),
        output=tmp_path / "prefill.json",
    )
    # Its reads take seconds in every turn.
    monkeypatch.setattr("benchmarks.prefill.measure_bandwidth", lambda *_, **__: 1e9)
    run_prefill(config)
    report = read_document(config.output)
    assert [row["system"] for row in report["rows"]] == config.system
    assert report["disk_bytes_per_second"] == 1e9
    for row in report["rows"]:
        assert row["seconds"] > 0
        assert row["moved_mib"] > 0

    assert "| `promoe` | " in "\n".join(systems.prefill_table(report))


def test_row__takes_ratios_prompt_by_prompt() -> None:
    """The machine ran at a third of its speed in the second turn, which changes no ratio."""
    times = [
        PrefillTimes(seconds=1.2, compute_seconds=0.5, link_seconds=1.0),
        PrefillTimes(seconds=3.6, compute_seconds=1.5, link_seconds=3.0),
    ]
    assert make_row("promoe", times, [1 << 20, 3 << 20]).over_bound == pytest.approx(1.2)
