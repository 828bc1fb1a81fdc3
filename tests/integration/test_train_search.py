"""`moecast train -m` with intervals: a table, a picture, and the best run's entries."""

import csv
import json
from pathlib import Path

import pytest

from configs.cli import main
from configs.commands import TRAIN
from predictors.run_folder import find_run_entries
from tests.builders.models import tiny_qwen2_moe
from tests.builders.traces import make_spec, make_trace
from zoo.entry import open_entry


def test_search__leaves_the_entries_of_the_best_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.config import ModelConfig
    from runtime.store.model_source import identity

    model = tiny_qwen2_moe(tmp_path / "tiny", num_layers=4)
    spec = make_spec(hidden_size=32)
    config = ModelConfig(name="tiny", id=str(model), dtype="float32")
    spec = type(spec)(**{**spec.as_dict(), **identity(model, config)})
    make_trace(tmp_path / "trace", spec=spec, requests_per_unit=60)
    options = [f"model.id={model}", "model.name=tiny", f"trace={tmp_path / 'trace'}"]
    options += ["predictor=stride", "predictor.width=interval(4,32)", "loss=bce,listwise"]
    options += ["max_epochs=1", "batch_size=64", "replay_tokens=20", "figures=false", "logger=[]"]
    options += ["score_shifted=false", "sweep.trials=2", f"run_dir={tmp_path / 'sweep'}"]
    assert main("train", TRAIN, ["-m", *options]) == 0

    record = json.loads((tmp_path / "sweep/sweep.json").read_text())
    best = record["trials"][0]
    results = json.loads((tmp_path / f"sweep/{best['number']}/results.json").read_text())
    assert best["objective"] == results["predictors"]["stride"]["mean_accuracy"]
    assert best["objective"] == max(one["objective"] for one in record["trials"])
    assert results["training"]["width"] == best["options"]["predictor.width"]
    with (tmp_path / "sweep/sweep.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["trial", "predictor.width", "loss", "accuracy"]
    assert len(rows) == 3
    assert (tmp_path / "sweep/sweep.png").read_bytes().startswith(b"\x89PNG")
    entries = find_run_entries(tmp_path / "sweep")
    assert entries == tmp_path / "sweep/entries"
    copied = open_entry(entries / "stride")
    copied.verify()
    assert copied.manifest.metrics["accuracy"] == best["objective"]
    shown = capsys.readouterr()
    assert "predictor.width" in shown.out
    assert f"best: trial {best['number']}" in shown.err
