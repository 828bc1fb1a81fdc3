"""`moecast train logger=...`: what loggers have written of a run is what the run found."""

import csv
import json
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.program import run_program
from tests.builders.traced_model import make_traced_model, training_options
from tests.builders.wandb_files import read_wandb_files
from zoo.entry import open_entry

MEANS = ("accuracy", "fetch_rate", "good_pred", "promoe_good_pred", "tpot_ms")
FIGURES = {name: f"mean_{name}" for name in MEANS}
FIGURES |= {name: name for name in ("worst_layer_accuracy", "bytes")}
"""A logger's name of a figure to that in results.json."""


@pytest.fixture
def command(tmp_path, monkeypatch):
    make_traced_model(tmp_path)
    # Artifacts are copied there.
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    own = ["predictor=stride", "score_shifted=false", "figures=false"]
    yield [*training_options(tmp_path, tmp_path / "run"), *own]
    # It keeps the environment of the first run.
    wandb.teardown()


def test_wandb__has_settings_curves_figures_and_lineage_in_one_run_that_resumes(command, tmp_path):
    run_dir = tmp_path / "run"
    command += ["logger=wandb,csv", "budget=75%"]
    assert run_program("train", command) == 0
    # As if it had been interrupted while it was scored.
    (run_dir / "results.json").unlink()
    assert run_program("train", command) == 0
    first, again = read_wandb_files(run_dir)
    assert (first.run.run_id, first.exit_code, again.exit_code) == (again.run.run_id, 0, 0)
    results = json.loads((run_dir / "results.json").read_text())

    config = first.config
    assert config["model"]["name"] == "tiny"
    assert config["base_model"]["revision"] == results["model"]["revision"]
    assert config["trace_digest"] == results["trace"]["digest"]
    assert {config["budget"], config["data"]["name"]} == {"75%", "pydocs"}
    assert (config["system"]["name"], config["hardware"]["name"]) == ("promoe", "rtx4090-pcie4")

    for predictor, found in results["predictors"].items():
        for name, key in FIGURES.items():
            assert again.summary.get(f"held_out/{predictor}/{name}") == found[key]
        latency = found["latency_us"]["1"]["layer_p50"]
        assert again.summary[f"held_out/{predictor}/latency_us"] == latency

    assert {
        *("train/loss", "train/loss/stride", "train/grad_norm", "train/tokens_per_second"),
        *("lr-AdamW/mlp-stride", "val/loss/stride", "val/accuracy/stride/layer_03"),
    } <= {name for row in first.history for name in row}
    with (run_dir / "logs" / "version_0" / "metrics.csv").open() as file:
        expected = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    logged = [row["val/loss"] for row in first.history if "val/loss" in row]
    assert (len(logged), logged) == (2, pytest.approx(expected))

    trace = first.artifacts["tiny-synthetic-trace"]
    assert (trace.type, trace.use_after_commit) == ("dataset", True)
    assert set(trace.aliases) == {"latest", results["trace"]["digest"]}
    best = min(results["predictors"], key=lambda name: results["predictors"][name]["mean_tpot_ms"])
    for name, folder in results["entries"].items():
        artifact, manifest = again.artifacts[f"tiny-{name}"], open_entry(folder).manifest
        assert (artifact.type, artifact.use_after_commit) == ("model", False)
        expected = {"latest", manifest.digest, *(["best"] if name == best else [])}
        assert set(artifact.aliases) == expected
        metadata = json.loads(artifact.metadata)
        assert metadata["trace_digest"] == results["trace"]["digest"]
        assert {key: metadata[key] for key in manifest.metrics} == manifest.metrics
        files = {entry.path for entry in artifact.manifest.contents}
        assert files == {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.*")}


def test_tensorboard__continues_its_curves(command, tmp_path) -> None:
    command += ["logger=[tensorboard,csv]"]
    assert run_program("train", command) == 0
    # All its epochs are finished: it adds no step.
    (tmp_path / "run" / "results.json").unlink()
    assert run_program("train", command) == 0
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = [event.value for event in found.Scalars("val/loss/stride")]
    assert [event.step for event in found.Scalars("val/loss/stride")] == [15, 31]
    assert losses[1] < losses[0]
    for name in ("train/loss/mlp", "train/grad_norm", "train/tokens_per_second"):
        assert [event.step for event in found.Scalars(name)] == [9, 19, 29]
        assert all(event.value > 0 for event in found.Scalars(name))
    # Two steps of warm-up, then down to zero at step 32.
    rates = [event.value for event in found.Scalars("lr-AdamW/mlp-stride")]
    assert rates == pytest.approx([4e-3 * (32 - step) / 30 for step in (9, 19, 29)])
    (first, _) = found.Scalars("held_out/stride/accuracy")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert first.value == pytest.approx(results["predictors"]["stride"]["mean_accuracy"])

    assert run_program("train", [*command, "overwrite=true", "seed=1"]) == 0
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert len(found.Scalars("val/loss/stride")) == 2
