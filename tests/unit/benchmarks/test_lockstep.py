"""Throughput of sequences that are generated together: its ratios, and a short run."""

import json

import pytest
import torch

from benchmarks.config import LockstepConfig
from benchmarks.lockstep import make_row, run_lockstep


def test_row__ratios_are_taken_within_each_round():
    """The machine ran at a third of its speed in the second round, which changes no ratio."""
    rounds = [
        {("eager", 1): 30.0, ("shared", 1): 24.0, ("shared", 8): 96.0},
        {("eager", 1): 10.0, ("shared", 1): 8.0, ("shared", 8): 32.0},
    ]
    row = make_row(rounds, "shared", 8, reference="eager")
    assert row.over_one == pytest.approx(4.0)
    assert row.over_reference == pytest.approx(3.2)
    assert row.tokens_per_second == pytest.approx(64.0)


def test_run__writes_a_row_for_each_setting_and_number(tmp_path):
    """A report that cannot be written would be noticed after all measurements only."""
    output = tmp_path / "lockstep.json"
    run_lockstep(
        LockstepConfig(
            output=output, clients=[2], repetitions=1, steps=1, threads=torch.get_num_threads()
        )
    )
    rows = json.loads(output.read_text())["rows"]
    settings = [(row["exact"], row["clients"]) for row in rows]
    assert settings == [("eager", 1), ("eager", 2), ("shared", 1), ("shared", 2)]
    assert all(row["tokens_per_second"] > 0 for row in rows)
