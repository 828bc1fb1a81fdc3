"""`moecast train` on a trace with few requests, such as a server has recorded in its first minutes,
and on a full disk: it says what it lacks before it writes, and a failed write changes nothing."""

import errno
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch import nn

from configs.program import run_program
from predictors.errors import DiskFullError
from predictors.files import write_atomic
from tests.builders.traced_model import make_traced_model, training_options
from train.checkpoint import COPIES, SPARE_BYTES, require_training_space

KINDS = ("predictor=residual", "reuse")


def train(folder: Path, num_requests: int, kind: str, *, batch_size: int = 4) -> int:
    """Runs `moecast train` on a trace of a tiny model; returns the exit code."""
    make_traced_model(folder, num_units=1, requests_per_unit=num_requests)
    less = ["overwrite=true", "figures=false", "threads=1", "score_shifted=false", "max_epochs=1"]
    given = [*training_options(folder, folder / "run"), *less, f"batch_size={batch_size}"]
    return run_program("train", [kind, *given])


COUNTS = [(1, "1 to train on, 0 for validation"), (3, "2 to train on, 1 for validation")]


@pytest.mark.parametrize(("num_requests", "counts"), COUNTS)
def test_train__on_few_requests_says_what_is_missing(num_requests, counts, tmp_path, capsys):
    for kind in KINDS:
        assert train(tmp_path, num_requests, kind) == 2
        assert f"too few requests: {counts}, 0 held out" in capsys.readouterr().err
        assert not (tmp_path / "run" / "entries").exists()


def test_train__on_fewer_tokens_than_a_batch_says_so(tmp_path, capsys):
    for kind in KINDS:
        assert train(tmp_path, 12, kind, batch_size=256) == 2
        assert "90 tokens to train on, a batch 256" in capsys.readouterr().err


def test_train__on_one_held_out_request_works(tmp_path: Path) -> None:
    for kind in KINDS:
        assert train(tmp_path, 4, kind) == 0


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
    for kind in KINDS:
        assert train(tmp_path, 12, kind) == 2
        assert "1,000 are free" in capsys.readouterr().err
        assert not [*(tmp_path / "run").rglob("*.ckpt")]


def test_write_atomic__on_a_full_disk_keeps_the_old_content(tmp_path, monkeypatch):
    file = tmp_path / "last.ckpt"
    write_atomic(file, b"before")

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    leave_free(monkeypatch, 3)
    with pytest.raises(DiskFullError, match=r"disk is full \(5 bytes needed, 3 free\).*unchanged"):
        write_atomic(file, b"after")
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]
