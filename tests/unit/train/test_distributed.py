"""Training by groups of layers: bitwise the weights of one process, however layers are cut."""

import csv
import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger

from collect.config import LauncherConfig
from collect.errors import LaunchError
from collect.launch.worker import UnitWorker
from collect.traces import Trace
from runtime.config import ModelConfig
from runtime.serving.ray_cluster import HeadLost
from runtime.store.model_source import identity
from tests.builders.launched import InlineEngine
from tests.builders.models import tiny_qwen2_moe
from tests.builders.traces import make_spec, make_trace
from train import ray_ddp
from train.distributed import fit_distributed, layer_groups
from train.fit import FitSettings, Fitted, digest_weights, fit
from train.networks import PlainStack, network_specs
from train.pipeline import make_stacks
from train.predictor_stack import PredictorStack
from train.ray_ddp import log_curves, watch_head
from train.residual import ResidualStack
from train.routers import RouterWeights

KINDS = ("mlp", "stride", "pre-attention", "residual")
SETTINGS = FitSettings(
    kinds=KINDS,
    width=24,
    loss="bce",
    max_epochs=4,
    batch_size=64,
    lr=2e-2,
    weight_decay=1e-2,
    seed=3,
    patience=1,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tiny_qwen2_moe(tmp_path_factory.mktemp("model") / "tiny", num_layers=5)
    return ModelConfig(name="tiny", id=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, model: ModelConfig) -> Trace:
    spec = make_spec(num_layers=5, hidden_size=32)
    spec = replace(spec, **identity(Path(model.id), model))
    return make_trace(tmp_path_factory.mktemp("trace") / "t", spec=spec, requests_per_unit=60)


@pytest.fixture(scope="module")
def folder_together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def together(trace: Trace, model: ModelConfig, folder_together: Path) -> Fitted:
    folder = folder_together
    families = make_stacks(trace, RouterWeights(model, trace.spec), SETTINGS, KINDS)
    return fit(trace, families, SETTINGS, run_dir=folder, loggers=[CSVLogger(folder)])


def by_groups(
    trace: Trace,
    model: ModelConfig,
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    layers: int,
    broken: str | None = None,
) -> tuple[Fitted | LaunchError, list[str]]:
    """What came of it, and the groups that were trained."""
    engines: list[InlineEngine] = []

    def start_inline(_: LauncherConfig, entry: str, arguments: dict, *__: object) -> InlineEngine:
        engines.append(InlineEngine(UnitWorker(entry, json.dumps(arguments), 1), broken=broken))
        return engines[-1]

    patch.setattr("collect.launch.pool.start_engine", start_inline)
    made: Fitted | LaunchError
    try:
        made = fit_distributed(
            trace,
            model,
            make_stacks(trace, RouterWeights(model, trace.spec), SETTINGS, KINDS),
            SETTINGS,
            launcher=LauncherConfig(workers=1, layers=layers, retries=1),
            run_dir=folder,
            loggers=[CSVLogger(folder)],
        )
    except LaunchError as error:
        made = error
    return made, [unit for engine in engines for unit in engine.tried]


@given(st.integers(2, 9), st.integers(1, 10), st.sets(st.sampled_from(KINDS), min_size=1))
def test_groups__have_every_network_once(num_layers: int, layers: int, kinds: set[str]) -> None:
    spec = make_spec(num_layers=num_layers)
    plain = [kind for kind in ("mlp", "stride", "pre-attention") if kind in kinds]
    if plain == ["stride"] and num_layers == 2:
        return
    families: list[PredictorStack] = []
    if plain:
        families.append(PlainStack(spec, network_specs(spec, plain), width=2, loss="bce"))
    if "residual" in kinds:
        routers_LED = np.zeros((num_layers, spec.num_experts, spec.hidden_size), np.float32)
        families.append(ResidualStack(spec, routers_LED, None, horizons=3, width=2))
    groups = layer_groups(families, layers=layers)
    found = [label for one in groups for label in one.labels]
    assert sorted(found) == sorted(label for family in families for label in family.labels)
    assert sum(one.name == "residual" for one in groups) == ("residual" in kinds)
    for one in groups:
        if isinstance(one.family, PlainStack):
            targets = [one.family.edges[n].target for n in one.indices]
            assert max(targets) - min(targets) < layers


@pytest.mark.parametrize("layers", [1, 2])
def test_fit__by_groups_is_bitwise_what_it_is_together(
    layers: int,
    trace: Trace,
    model: ModelConfig,
    together: Fitted,
    folder_together: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, trained = by_groups(trace, model, tmp_path, monkeypatch, layers=layers)
    assert isinstance(made, Fitted)
    assert len(trained) == 1 + -(-5 // layers)
    for one, other in zip(together.families, made.families, strict=True):
        for (name, value), (_, found) in zip(
            one.state_dict().items(), other.state_dict().items(), strict=True
        ):
            assert torch.equal(value, found), name
    assert digest_weights(made.families) == digest_weights(together.families)
    assert (made.steps, made.best_epoch) == (together.steps, together.best_epoch)
    assert made.validation_accuracy == together.validation_accuracy
    for curve in ("val/mean_accuracy", "val/loss", "val/loss/residual", "val/loss/mlp"):
        assert read_curve(tmp_path, curve) == pytest.approx(read_curve(folder_together, curve))


def read_curve(folder: Path, name: str) -> list[float]:
    """Steps and values, in turn, in the file of CSVLogger."""
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row[name]]
    assert rows
    return [number for row in rows for number in (int(row["step"]), float(row[name]))]


def test_log_curves__gives_loggers_what_another_process_has_written(tmp_path: Path) -> None:
    """In two tries: the second goes on after step 15."""
    first = {9: {"train/loss": 2.5}, 15: {"val/loss": 1.5, "epoch": 0.0}, 19: {"train/loss": 9.0}}
    second = {19: {"train/loss": 2.0}, 31: {"val/loss": 1.0, "epoch": 1.0}}
    for number, rows in enumerate((first, second)):
        written = CSVLogger(tmp_path, name="theirs", version=f"{number:03d}")
        for step, figures in rows.items():
            written.log_metrics(figures, step=step)
        written.save()
    logger = CSVLogger(tmp_path)
    log_curves(sorted(tmp_path.glob("theirs/*/metrics.csv")), [logger])
    logger.save()
    assert read_curve(tmp_path, "train/loss") == [9, 2.5, 19, 2.0]
    assert read_curve(tmp_path, "val/loss") == [15, 1.5, 31, 1.0]


def test_fit__a_second_run_trains_only_the_failed_group(
    trace: Trace,
    model: ModelConfig,
    together: Fitted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = "plain-layers-02-03"
    failed, trained = by_groups(trace, model, tmp_path, monkeypatch, layers=2, broken=broken)
    assert isinstance(failed, LaunchError)
    assert "1 of 4 units failed, the others are done" in str(failed)
    assert "OSError: broken" in str(failed)
    assert len(trained) == 4 + 1, "it was tried again"
    made, trained = by_groups(trace, model, tmp_path, monkeypatch, layers=2)
    assert isinstance(made, Fitted)
    assert len(trained) == 1
    assert trained[0].startswith(broken)
    assert made.resumed
    assert digest_weights(made.families) == digest_weights(together.families)
    # A torn file is trained again; a whole run trains nothing.
    (victim,) = (tmp_path / "groups").glob("plain-layers-00-01-*")
    victim.write_bytes(victim.read_bytes()[:-1])
    made, trained = by_groups(trace, model, tmp_path, monkeypatch, layers=2)
    assert trained == [victim.name]
    made, trained = by_groups(trace, model, tmp_path, monkeypatch, layers=2)
    assert trained == []
    assert isinstance(made, Fitted)
    assert digest_weights(made.families) == digest_weights(together.families)


class LostHead:
    """A watch that misses the cluster's head."""

    def check(self, *, at_once: bool = False) -> bool:
        raise HeadLost("the head has not answered for 40 seconds")


def test_watch__ends_a_training_that_waits_for_a_lost_head(monkeypatch) -> None:
    monkeypatch.setattr(ray_ddp, "HEAD_POLL_SECONDS", 0.01)
    is_released = threading.Event()
    with pytest.raises(LaunchError, match=r"has not answered.*run the same command"):
        watch_head(is_released.wait, LostHead())
    is_released.set()


def test_watch__raises_what_the_training_raised() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch_head(fail, LostHead())
    watch_head(lambda: None, LostHead())
