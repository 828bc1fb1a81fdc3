"""A full disk: `train` says what it needs before it writes, and a failed write changes nothing."""

import errno
import os
import shutil

import pytest
from torch import nn

from predictors.errors import DiskFullError
from predictors.files import write_atomic
from tests.unit.train.test_few_requests import KINDS, train
from train.checkpoint import COPIES, SPARE_BYTES, require_training_space


def leave_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_training_space__names_needed_and_free_bytes(tmp_path, monkeypatch):
    network = nn.Linear(1000, 1000, bias=False)
    needed = COPIES * 4_000_000 + SPARE_BYTES
    leave_free(monkeypatch, needed)
    require_training_space(tmp_path / "new" / "run", [network])
    leave_free(monkeypatch, needed - 1)
    with pytest.raises(DiskFullError, match=f"up to {needed:,} bytes.*{needed - 1:,} are free"):
        require_training_space(tmp_path / "new" / "run", [network])
    assert not (tmp_path / "new").exists()


def test_train__on_a_full_disk_writes_no_checkpoint(tmp_path, monkeypatch, capsys):
    leave_free(monkeypatch, 1000)
    for options in KINDS:
        assert train(tmp_path, 12, *options, "batch_size=4") == 2
        assert "1,000 are free" in capsys.readouterr().err
        assert not [*(tmp_path / "run").rglob("*.ckpt")]


def test_write_atomic__on_a_full_disk_keeps_the_old_content(tmp_path, monkeypatch):
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
