"""Nothing is recorded twice: `collect` and `train` find each other's traces."""

import contextlib
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
from predictors.metrics import Phase
from runtime.config import DenseFormat, ModelConfig
from tests.builders.recordable import letters_data, recordable
from train.config import TrainConfig
from train.find_trace import find_trace

TRACES = Path("runs/traces/tiny")
"""Where `collect` writes traces of the model."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, ModelConfig, DataConfig, str]:
    """A folder with a model, its data, and the digest of their trace."""
    folder = tmp_path_factory.mktemp("recorded")
    model = recordable(folder / "model", num_layers=2)
    data = letters_data(folder, count=4, new_tokens=1)
    settings = recording_settings(data, batch_size=2)
    with contextlib.chdir(folder):
        return folder, model, data, collect(model, data, settings=settings).digest


@pytest.fixture
def recorded(made, monkeypatch) -> tuple[ModelConfig, DataConfig, str]:
    """The same, in the folder and without it; no model can be loaded any more."""
    folder, *known = made
    monkeypatch.chdir(folder)
    monkeypatch.setattr("runtime.load", lambda *_, **__: pytest.fail("loaded the model"))
    return tuple(known)


def test_collect__reuses_a_trace_of_other_batches_and_more_signals(recorded) -> None:
    model, data, digest = recorded
    out = io.StringIO()
    others = {"signals": ROUTING_SIGNALS, "settings": recording_settings(data)}
    again = collect(model, data, console=Console(file=out), **others)
    assert again.digest == digest
    (line,) = out.getvalue().splitlines()
    assert line == f"{again.where}: reused, these prompts are recorded already"


def test_train__finds_what_collect_recorded(recorded, tmp_path: Path) -> None:
    model, data, digest = recorded
    config = TrainConfig(model=model, data=data, run_dir=tmp_path / "run")
    assert find_trace(config, ROUTING_SIGNALS).digest == digest


def test_collect__a_changed_file_of_prompts_is_another_trace(made, tmp_path, monkeypatch) -> None:
    model, data = made[1], letters_data(tmp_path, count=4, new_tokens=1)
    monkeypatch.chdir(tmp_path)
    first, lines = collect(model, data), Path(data.path).read_text()
    Path(data.path).write_text(lines.replace("quick", "slow"))
    assert collect(model, data).digest != first.digest
    Path(data.path).write_text(lines)
    assert collect(model, data).digest == first.digest


OTHER_CONTENTS = [
    *(("settings", {name: 3}) for name in ("seed", "temperature", "new_tokens")),
    ("data", {"num_prompts": 3}),
    *(("model", one) for one in ({"dtype": "bfloat16"}, {"dense_format": DenseFormat.INT8})),
]


@pytest.mark.parametrize(("part", "changed"), OTHER_CONTENTS)
def test_find_same_trace__is_none_for_another_content(recorded, part: str, changed: dict) -> None:
    model, data, _ = recorded
    job = RecordingJob(model, data, "trace", ROUTING_SIGNALS, recording_settings(data), "auto")
    assert find_same_trace(job, TRACES) is not None
    other = replace(job, **{part: replace(getattr(job, part), **changed)})
    assert find_same_trace(other, TRACES) is None


def test_open_finished__refuses_a_trace_of_other_dense_layers(recorded) -> None:
    model, data, digest = recorded
    settings = recording_settings(data, batch_size=2)
    job = RecordingJob(model, data, "t", ALL_SIGNALS, settings, "auto")
    job = replace(job, where=str(find_same_trace(job, TRACES)))
    assert job.open_finished().digest == digest
    with pytest.raises(TraceError, match=r"contains another trace \(settings: "):
        replace(job, model=replace(model, dense_format=DenseFormat.INT4)).open_finished()


def test_find_same_trace__skips_a_damaged_trace_and_says_so(recorded, caplog) -> None:
    model, data, _ = recorded
    job = RecordingJob(model, data, "t", ROUTING_SIGNALS, recording_settings(data), "auto")
    (TRACES / "a-damaged-one").mkdir()
    (TRACES / "a-damaged-one/trace.json").write_text("{")
    assert find_same_trace(job, TRACES) is not None
    assert "a-damaged-one/trace.json is damaged" in caplog.text


def test_find_same_trace__needs_all_signals(made, tmp_path: Path) -> None:
    _, model, data, _ = made
    settings = replace(recording_settings(data), new_tokens=0)
    few = {"folder": tmp_path / "a", "signals": ROUTING_SIGNALS, "settings": settings}
    trace = collect(model, data, **few)
    assert (trace.signals, set(trace.phases.tolist())) == (ROUTING_SIGNALS, {Phase.PREFILL})
    job = RecordingJob(model, data, "t", ROUTING_SIGNALS, settings, "auto")
    assert find_same_trace(job, tmp_path) == tmp_path / "a"
    assert find_same_trace(replace(job, signals=ALL_SIGNALS), tmp_path) is None
