"""Nothing is recorded twice: `collect` and `train` find each other's traces."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from collect.config import DataConfig
from collect.errors import TraceError
from collect.plan import RecordingJob, recording_settings
from collect.record import collect, find_same_trace
from collect.traces.layout import ALL_SIGNALS, ROUTING_SIGNALS
from runtime.config import DenseFormat, ModelConfig
from tests.builders.recordable import letters_data, recordable
from train.config import TrainConfig
from train.find_trace import find_trace


@pytest.fixture
def recorded(tmp_path, monkeypatch) -> tuple[ModelConfig, DataConfig, str]:
    """A model, its data, and the digest of their trace; no model can be loaded any more."""
    monkeypatch.chdir(tmp_path)
    model = recordable(tmp_path / "model", num_layers=2)
    data = letters_data(tmp_path, count=4, new_tokens=1)
    settings = recording_settings(data, batch_size=2)
    digest = collect(model, data, signals=ALL_SIGNALS, settings=settings).digest
    monkeypatch.setattr("runtime.load", lambda *_, **__: pytest.fail("loaded the model"))
    return model, data, digest


def test_collect__reuses_a_trace_of_other_batches_and_more_signals(recorded) -> None:
    model, data, digest = recorded
    out = io.StringIO()
    settings = recording_settings(data)
    again = collect(
        model, data, signals=ROUTING_SIGNALS, settings=settings, console=Console(file=out)
    )
    assert again.digest == digest
    (line,) = out.getvalue().splitlines()
    assert line == f"{again.where}: reused, these prompts are recorded already"


def test_train__finds_what_collect_recorded(recorded, tmp_path: Path) -> None:
    model, data, digest = recorded
    config = TrainConfig(model=model, data=data, run_dir=tmp_path / "run")
    assert find_trace(config, ROUTING_SIGNALS).digest == digest


@pytest.mark.parametrize(
    "changed", ["seed", "temperature", "new_tokens", "prompts", "dtype", "dense_format"]
)
def test_find_same_trace__is_none_for_another_content(recorded, tmp_path, changed: str) -> None:
    model, data, _ = recorded
    settings = recording_settings(data)
    if changed == "prompts":
        data = replace(data, num_prompts=3)
    elif changed == "dtype":
        model = replace(model, dtype="bfloat16")
    elif changed == "dense_format":
        model = replace(model, dense_format=DenseFormat.INT8)
    else:
        settings = replace(settings, **{changed: 3})
    job = RecordingJob(model, data, "trace", ROUTING_SIGNALS, settings, "auto")
    assert find_same_trace(job, tmp_path / "runs/traces/tiny") is None


def test_open_finished__refuses_a_trace_of_other_dense_layers(recorded, tmp_path: Path) -> None:
    model, data, digest = recorded
    settings = recording_settings(data, batch_size=2)
    job = RecordingJob(model, data, "t", ALL_SIGNALS, settings, "auto")
    job = replace(job, where=str(find_same_trace(job, tmp_path / "runs/traces/tiny")))
    assert job.open_finished().digest == digest
    rounded = replace(job, model=replace(model, dense_format=DenseFormat.INT4))
    with pytest.raises(TraceError, match=r"contains another trace \(settings: "):
        rounded.open_finished()


def test_find_same_trace__skips_a_damaged_trace_and_says_so(recorded, tmp_path, caplog) -> None:
    model, data, _ = recorded
    folder = tmp_path / "runs/traces/tiny"
    job = RecordingJob(model, data, "t", ROUTING_SIGNALS, recording_settings(data), "auto")
    (folder / "a-damaged-one").mkdir()
    (folder / "a-damaged-one/trace.json").write_text("{")
    assert find_same_trace(job, folder) is not None
    assert "a-damaged-one/trace.json is damaged" in caplog.text


def test_find_same_trace__needs_all_signals(tmp_path: Path) -> None:
    model = recordable(tmp_path / "model", num_layers=2)
    data = letters_data(tmp_path, count=2, new_tokens=1)
    settings = recording_settings(data)
    folder = tmp_path / "traces"
    collect(model, data, folder=folder / "a", signals=ROUTING_SIGNALS, settings=settings)
    job = RecordingJob(model, data, "t", ROUTING_SIGNALS, settings, "auto")
    assert find_same_trace(job, folder) == folder / "a"
    assert find_same_trace(replace(job, signals=ALL_SIGNALS), folder) is None
