"""`moecast train reuse`: from a trace to an entry that loads, compared with every policy."""

import json
from pathlib import Path

import numpy as np
import pytest

from configs.program import run_program
from predictors.reuse import ReusePredictor
from tests.builders.traced_model import make_traced_model
from train.eviction_eval import BUDGETS, POLICIES, gap_closed
from zoo.load import load_predictor


def test_train_reuse__compares_every_policy_and_writes_an_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_traced_model(tmp_path)
    arguments = [
        "reuse",
        f"model.id={folder}",
        "model.name=tiny",
        f"trace={tmp_path / 'trace'}",
        f"run_dir={tmp_path / 'run'}",
        "max_epochs=2",
        "batch_size=64",
        "replay_tokens=12",
    ]
    assert run_program("train", arguments) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    for stream in results["hit_rates"].values():
        assert list(stream) == list(BUDGETS)
        for rates in stream.values():
            assert list(rates) == list(POLICIES)
            assert all(0 <= one["decode"] <= 1 for one in rates.values())
            assert all(one["decode"] <= rates["belady"]["decode"] + 1e-9 for one in rates.values())
            assert rates["lru"]["decode_gap_closed"] in (0.0, None)
    assert "gap closed" in capsys.readouterr().out
    forecaster = load_predictor(results["entries"]["reuse"], spec=None)
    assert isinstance(forecaster, ReusePredictor)
    one = np.zeros(1, np.int64)
    forecaster.begin_step(one, one)
    forecaster.gate_input(2, np.zeros((1, 32), np.float32))
    (value,) = forecaster.routed(2, np.array([[1, 3]]), None)
    assert value.scores_TE.shape == (1, 8)


def test_gap_closed__is_nothing_where_there_is_no_gap() -> None:
    assert gap_closed(0.5, 0.8, 0.9) == pytest.approx(0.75)
    assert gap_closed(0.5, 0.5, 0.5) is None
    assert gap_closed(None, 0.5, 0.9) is None
