"""A trace that was named is opened as it is: a mistyped name is refused, never recorded into."""

from pathlib import Path

import pytest

from collect.traces import TraceWriter
from runtime.config import DenseFormat, ModelConfig
from tests.builders.traces import make_plan, make_spec, make_trace
from train.errors import TrainError
from train.find_trace import open_named_trace, require_model


def test_named_trace__a_mistyped_one_is_refused_with_what_is_there(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "mine")
    assert open_named_trace(trace.path, ModelConfig()).digest == trace.digest
    with pytest.raises(TrainError) as refused:
        open_named_trace(tmp_path / "mien", ModelConfig(id="org/model"), key="shifted_trace")
    message = str(refused.value)
    assert f"shifted_trace={tmp_path / 'mien'} is not a trace. {tmp_path} has mine." in message
    assert f"moecast collect model.id=org/model output={tmp_path / 'mien'} records one" in message
    assert not (tmp_path / "mien").exists()


def test_named_trace__an_incomplete_one_is_refused(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t", make_plan(make_spec()))
    with pytest.raises(TrainError, match="is an incomplete trace"):
        open_named_trace(tmp_path / "t", ModelConfig())


def test_named_trace__of_another_dense_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.find_trace.find_differences", lambda *_: {})
    trace = make_trace(tmp_path / "mine")
    plain, rounded = ModelConfig(), ModelConfig(dense_format=DenseFormat.INT8)
    require_model(trace, plain, key="trace")
    with pytest.raises(TrainError, match='dense_format: the trace has "own", .* has "int8"'):
        require_model(trace, rounded, key="trace")
    trace.manifest.plan.settings["dense_format"] = "int8"
    require_model(trace, rounded, key="trace")
    with pytest.raises(TrainError, match='dense_format: the trace has "int8", .* has "own"'):
        require_model(trace, plain, key="trace")
