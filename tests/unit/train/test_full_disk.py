"""A full disk: `train` says what it needs before it writes, and a failed write changes nothing."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from torch import nn

from predictors.config import PredictorConfig
from predictors.errors import DiskFullError
from predictors.files import write_atomic
from runtime.config import ModelConfig
from tests.builders.models import tiny_qwen2_moe
from tests.builders.traces import make_spec, make_trace
from train.checkpoint import COPIES, SPARE_BYTES, require_training_space
from train.config import TrainConfig
from train.fit import make_settings
from train.routers import RouterWeights

Usage = namedtuple("Usage", "total used free")


def leave_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - free, free))


def test_training_space__names_needed_and_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nn.Linear(1000, 1000, bias=False)
    needed = COPIES * 4_000_000 + SPARE_BYTES
    leave_free(monkeypatch, needed)
    require_training_space(tmp_path / "new" / "run", [network])
    leave_free(monkeypatch, needed - 1)
    with pytest.raises(DiskFullError, match=f"up to {needed:,} bytes.*{needed - 1:,} are free"):
        require_training_space(tmp_path / "new" / "run", [network])
    assert not (tmp_path / "new").exists()


def test_train__on_a_full_disk_writes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.commands import StageTimer, train_networks

    folder = tiny_qwen2_moe(tmp_path / "tiny", num_layers=4)
    trace = make_trace(tmp_path / "trace", spec=make_spec(hidden_size=32))
    run_dir = tmp_path / "run"
    config = TrainConfig(
        model=ModelConfig(name="tiny", id=str(folder)),
        predictor=PredictorConfig(width=32),
        run_dir=run_dir,
    )
    settings = make_settings(config, ("mlp",))
    leave_free(monkeypatch, 1000)
    with pytest.raises(DiskFullError, match="1,000 are free"):
        train_networks(
            config, trace, RouterWeights(config.model, trace.spec), settings, [], StageTimer()
        )
    assert not (run_dir / "checkpoints").exists()


def test_write_atomic__on_a_full_disk_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "last.ckpt"
    write_atomic(file, b"before")

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    leave_free(monkeypatch, 3)
    with pytest.raises(DiskFullError, match=r"disk is full \(5 bytes needed, 3 free\).*unchanged"):
        write_atomic(file, b"after")
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]
