"""A trace with few requests, such as a server has recorded in its first minutes."""

from pathlib import Path

import pytest

from configs.program import run_program
from tests.builders.traced_model import make_traced_model

KINDS = (["predictor=residual", "predictor.width=16"], ["reuse"])


def train(folder: Path, num_requests: int, *options: str) -> int:
    """Runs `moecast train` on a trace of a tiny model; returns the exit code."""
    model = make_traced_model(folder, num_units=1, requests_per_unit=num_requests)
    given = [
        *(f"model.id={model}", "model.name=tiny", f"trace={folder / 'trace'}"),
        *(f"run_dir={folder / 'run'}", "overwrite=true", "figures=false", "threads=1"),
        *("score_shifted=false", "max_epochs=1", "replay_tokens=10"),
    ]
    return run_program("train", [*options, *given])


@pytest.mark.parametrize(
    ("num_requests", "counts"),
    [(1, "1 to train on, 0 for validation"), (3, "2 to train on, 1 for validation")],
)
def test_train__on_few_requests_says_what_is_missing(num_requests, counts, tmp_path, capsys):
    for options in KINDS:
        assert train(tmp_path, num_requests, *options, "batch_size=4") == 2
        error = capsys.readouterr().err
        assert f"too few requests: {counts}, 0 held out" in error
        assert not (tmp_path / "run" / "entries").exists()


def test_train__on_fewer_tokens_than_a_batch_says_so(tmp_path, capsys):
    for options in KINDS:
        assert train(tmp_path, 12, *options, "batch_size=256") == 2
        assert "90 tokens to train on, a batch 256" in capsys.readouterr().err


def test_train__on_one_held_out_request_works(tmp_path: Path) -> None:
    for options in KINDS:
        assert train(tmp_path, 4, *options, "batch_size=4") == 0
