"""Training on a synthetic trace: it learns, resumes exactly, and is scored as it is replayed."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from collect.traces import Trace
from predictors.base import Predictor
from tests.builders.traces import make_trace
from train import fit
from train.accuracy import replay_forecasts, score_layers
from train.data import TraceBatches, TraceSubset, shuffle_rows, subset_rows
from train.errors import TrainCheckpointError, TrainError
from train.networks import PlainStack, network_specs
from train.nonlearned import fit_popularity, fit_token
from train.pipeline import export_predictors


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_trace(tmp_path_factory.mktemp("trace") / "t", requests_per_unit=60)


SETTINGS = fit.FitSettings(
    kinds=("mlp", "stride"), width=32, loss="bce", max_epochs=4, batch_size=64, lr=1e-2,
    weight_decay=0.0, seed=0,
)  # fmt: skip


def run(trace: Trace, run_dir: Path, **changes) -> fit.Fitted:
    chosen = replace(SETTINGS, **changes)
    logger = CSVLogger(run_dir, name="logs", version="")
    torch.manual_seed(chosen.seed)
    networks = network_specs(trace.spec, chosen.kinds)
    family = PlainStack(trace.spec, networks, width=chosen.width, loss=chosen.loss)
    return fit.Training(trace, [family], chosen, run_dir / fit.CHECKPOINTS).fit([logger])


def mean_accuracy(predictor: Predictor, trace: Trace, layers: range) -> float:
    scores = score_layers(predictor, trace)
    return float(np.mean([scores[layer].overall.value for layer in layers]))


def test_fit__learns_more_than_popularity(trace: Trace, tmp_path: Path) -> None:
    made, _ = export_predictors(run(trace, tmp_path).families, trace)
    popular = fit_popularity(trace)
    for kind, first in (("mlp", 1), ("stride", 2)):
        layers = range(first, trace.spec.num_layers)
        least = mean_accuracy(popular, trace, layers) + 0.1
        assert mean_accuracy(made[kind], trace, layers) > least


class Stop(Callback):
    """Ends the process's part of the training, as a kill after the second pass would."""

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 2:
            raise KeyboardInterrupt


def test_fit__resumed_in_a_moved_folder_equals_uninterrupted(trace, tmp_path, monkeypatch):
    """Epoch 1 of 5 is the best, which a run resumed at epoch 2 must still know."""
    changes = {"lr": 0.05, "max_epochs": 8, "patience": 3}
    whole = run(trace, tmp_path / "whole", **changes)
    assert (whole.best_epoch, whole.steps) == (1, 5 * 16)
    with monkeypatch.context() as patch:
        patch.setattr(fit, "PlainProgress", Stop)
        with pytest.raises(KeyboardInterrupt):
            run(trace, tmp_path / "cut", **changes)
    (tmp_path / "cut").rename(tmp_path / "moved")
    resumed = run(trace, tmp_path / "moved", **changes)
    assert (resumed.steps, resumed.best_epoch) == (whole.steps, whole.best_epoch)
    assert resumed.validation_accuracy == whole.validation_accuracy
    assert fit.digest_weights(resumed.families) == fit.digest_weights(whole.families)


def test_fit__that_had_stopped_early_runs_no_further_epoch(trace: Trace, tmp_path: Path) -> None:
    """As when the command was killed between the last epoch and the entries."""
    changes = {"lr": 0.05, "max_epochs": 8, "patience": 1}
    whole, again = (run(trace, tmp_path, **changes) for _ in range(2))
    assert (whole.best_epoch, whole.steps) == (1, 3 * 16)
    assert (again.resumed, again.steps) == (True, whole.steps)
    assert fit.digest_weights(again.families) == fit.digest_weights(whole.families)


@pytest.mark.parametrize("lr", [1.0, 1e30])
def test_fit__that_diverges_names_the_epoch_and_what_to_change(lr, trace, tmp_path):
    message = r"diverged in epoch 1: train/loss/mlp is .*\(lr="
    with pytest.raises(TrainError, match=message) as error:
        run(trace, tmp_path, lr=lr, width=256)
    assert ("is nan, and" in str(error.value)) == (lr > 1)
    assert not (tmp_path / fit.CHECKPOINTS).exists(), "the networks of before are kept, not these"


def test_fit__an_epoch_that_is_announced_is_on_the_disk(trace, tmp_path, monkeypatch):
    announced = []

    def write(line: str) -> None:
        if line.startswith("training: epoch"):
            saved = fit.read_checkpoint(tmp_path / fit.CHECKPOINTS / "last.ckpt")
            announced.append((line.split()[2], int(saved["epoch"]) + 1))

    monkeypatch.setattr(fit.sys.stderr, "write", write)
    run(trace, tmp_path, max_epochs=2)
    assert announced == [("1", 1), ("2", 2)]


def test_fit__refuses_damaged_checkpoints(trace: Trace, tmp_path: Path) -> None:
    run(trace, tmp_path, max_epochs=1)
    for name in ("last.ckpt", "best.ckpt"):
        path = tmp_path / fit.CHECKPOINTS / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(TrainCheckpointError, match=rf"{name} is torn.*overwrite=true$"):
            run(trace, tmp_path, max_epochs=1)
        path.write_bytes(whole)
    path.unlink()
    with pytest.raises(TrainCheckpointError, match=r"best.ckpt is missing"):
        run(trace, tmp_path, max_epochs=1)


def test_fit__depends_on_the_seed(trace: Trace, tmp_path: Path) -> None:
    one, other = (run(trace, tmp_path / str(seed), max_epochs=1, seed=seed) for seed in (0, 1))
    assert fit.digest_weights(one.families) != fit.digest_weights(other.families)


def test_data__parts_share_no_request_and_make_up_the_trace(trace: Trace) -> None:
    rows = {part: subset_rows(trace, part) for part in TraceSubset}
    assert np.array_equal(np.sort(np.concatenate([*rows.values()])), np.arange(trace.num_tokens))
    requests = {part: set(trace.requests[own].tolist()) for part, own in rows.items()}
    assert sum(map(len, requests.values())) == len(set.union(*requests.values()))
    num_training = sum(request.split == "train" for request in trace.request_table)
    assert len(requests[TraceSubset.VALIDATION]) == max(1, num_training // 20)


def test_data__shuffles_all_rows_and_the_same_way_for_an_epoch() -> None:
    rows = np.arange(1_000) * 3
    shuffled = (shuffle_rows(rows, pool_rows=300, seed=1, epoch=epoch) for epoch in (0, 0, 1))
    pools = [np.concatenate(list(one)) for one in shuffled]
    assert np.array_equal(np.sort(pools[0]), rows)
    assert np.array_equal(pools[0], pools[1])
    assert not np.array_equal(pools[0], pools[2])


def test_data__yields_each_rows_own_values(trace: Trace) -> None:
    """Small pools, so that the reading order and the random order differ."""
    rows = list(shuffle_rows(subset_rows(trace, TraceSubset.FIT), pool_rows=64, seed=3, epoch=2))
    batches = TraceBatches(trace, TraceSubset.FIT, batch_size=64, seed=3, epoch=2, pool_bytes=1)
    for batch, expected in zip(batches, (one for one in rows if len(one) == 64), strict=True):
        for layer in range(trace.spec.num_layers):
            hidden = trace.column("gate_input", layer)[expected].astype(np.float32)
            assert torch.equal(batch.gate_LBD[layer], torch.from_numpy(hidden))
            chosen = trace.column("experts", layer)[expected].astype(np.int64)
            assert torch.equal(batch.chosen_LBK[layer], torch.from_numpy(chosen))


def test_score__in_blocks_equals_the_replay_step_by_step(trace: Trace, tmp_path: Path) -> None:
    """The hits are counted with sets."""
    made, _ = export_predictors(run(trace, tmp_path, max_epochs=1).families, trace)
    for predictor in (*made.values(), fit_token(trace), fit_popularity(trace)):
        hits = [0] * trace.spec.num_layers
        for step in trace.steps("held_out"):
            for forecast in replay_forecasts(predictor, step):
                best = np.argsort(-forecast.scores_TE, axis=1, kind="stable")[:, : trace.spec.top_k]
                pairs = zip(best.tolist(), step.experts(forecast.layer).tolist(), strict=True)
                hits[forecast.layer] += sum(len(set(one) & set(other)) for one, other in pairs)
        assert [one.overall.sum for one in score_layers(predictor, trace)] == hits


def test_fit__logs_loss_of_all_tokens_and_norm_of_all_gradients(trace, tmp_path, monkeypatch):
    norms = []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            squares = [(one.grad.double() ** 2).sum() for one in pl_module.parameters()]
            norms.append(float(sum(squares)) ** 0.5)

    monkeypatch.setattr(fit, "PlainProgress", Norms)
    (family,) = run(trace, tmp_path, max_epochs=1, batch_size=48).families
    rows = list(csv.DictReader((tmp_path / "logs/metrics.csv").read_text().splitlines()))
    batches = TraceBatches(trace, TraceSubset.VALIDATION, batch_size=7, needs=family.needs)
    losses = [family.losses(one).mul(one.chosen_LBK.size(1)).detach() for one in batches]
    loss_F = torch.stack(losses).sum(0) / len(subset_rows(trace, TraceSubset.VALIDATION))
    (logged,) = [row for row in rows if row["val/loss"]]
    assert float(logged["val/loss"]) == pytest.approx(float(loss_F.mean()), rel=1e-5)
    stride_F = loss_F[[label.startswith("stride/") for label in family.labels]]
    assert float(logged["val/loss/stride"]) == pytest.approx(float(stride_F.mean()), rel=1e-5)
    found = [float(row["train/grad_norm"]) for row in rows if row["train/grad_norm"]]
    # A run logs every tenth step.
    assert found == pytest.approx(norms[9::10], rel=1e-5)
    assert len(found) > 1


def test_trainer__in_a_slurm_job_is_not_one_of_its_tasks(trace, tmp_path, monkeypatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("SLURM_JOB_NAME", "training")
    assert run(trace, tmp_path, max_epochs=1).steps == 16
