"""`moecast train reuse`: from a trace to an entry that loads, compared with every policy."""

import json
from pathlib import Path

import numpy as np
import pytest

from configs.cli import main
from configs.commands import TRAIN
from predictors.reuse import ReusePredictor
from runtime.config import ModelConfig
from runtime.store.model_source import identity
from tests.builders.models import tiny_qwen2_moe
from tests.builders.traces import make_spec, make_trace
from train.eviction_eval import BUDGETS, POLICIES, gap_closed
from zoo.load import load_predictor


def test_train_reuse__compares_every_policy_and_writes_an_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_qwen2_moe(tmp_path / "tiny", num_layers=4)
    model = ModelConfig(name="tiny", id=str(folder), dtype="float32")
    spec = make_spec(hidden_size=32)
    spec = type(spec)(**{**spec.as_dict(), **identity(folder, model)})
    make_trace(tmp_path / "trace", spec=spec, requests_per_unit=60)
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
    assert main("train", TRAIN, arguments) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    for stream in results["hit_rates"].values():
        assert list(stream) == list(BUDGETS)
        for rates in stream.values():
            assert list(rates) == list(POLICIES)
            assert all(0 <= one["decode"] <= 1 for one in rates.values())
            assert all(one["decode"] <= rates["belady"]["decode"] + 1e-9 for one in rates.values())
            assert rates["lru"]["decode_gap_closed"] in (0.0, None)
    assert "gap closed" in capsys.readouterr().out
    forecaster = load_predictor(results["entries"]["reuse"], spec=spec)
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
