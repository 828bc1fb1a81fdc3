"""A trace with few requests, such as a server has recorded in its first minutes."""

from dataclasses import replace
from pathlib import Path

import pytest

from configs.program import run_program
from runtime.config import ModelConfig
from runtime.store.model_source import identity
from tests.builders.models import tiny_qwen2_moe
from tests.builders.traces import make_spec, make_trace

KINDS = (["predictor=residual", "predictor.width=16"], ["reuse"])


def train(folder: Path, num_requests: int, *options: str) -> int:
    """Runs `moecast train` on a new trace of a tiny model; returns the exit code."""
    model = ModelConfig(name="tiny", id=str(folder / "model"), dtype="float32")
    if not (folder / "model").exists():
        tiny_qwen2_moe(folder / "model", num_layers=4)
    spec = replace(make_spec(hidden_size=32), **identity(folder / "model", model))
    trace = folder / f"trace-{num_requests}"
    if not trace.exists():
        make_trace(trace, spec=spec, num_units=1, requests_per_unit=num_requests)
    return run_program(
        "train",
        [
            *options,
            *(f"model.id={folder / 'model'}", "model.name=tiny", f"trace={trace}"),
            *(f"run_dir={folder / 'run'}", "overwrite=true", "figures=false", "threads=1"),
            *("score_shifted=false", "max_epochs=1", "replay_tokens=10"),
        ],
    )


@pytest.mark.parametrize(
    ("num_requests", "counts"),
    [(1, "1 to train on, 0 for validation"), (3, "2 to train on, 1 for validation")],
)
def test_train__on_few_requests_says_what_is_missing(
    num_requests: int, counts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in KINDS:
        assert train(tmp_path, num_requests, *options, "batch_size=4") == 2
        error = capsys.readouterr().err
        assert f"too few requests: {counts}, 0 held out" in error
        assert not (tmp_path / "run" / "entries").exists()


def test_train__on_fewer_tokens_than_a_batch_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in KINDS:
        assert train(tmp_path, 12, *options, "batch_size=256") == 2
        assert "90 tokens to train on, a batch 256" in capsys.readouterr().err


def test_train__on_one_held_out_request_works(tmp_path: Path) -> None:
    for options in KINDS:
        assert train(tmp_path, 4, *options, "batch_size=4") == 0
