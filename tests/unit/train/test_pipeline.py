"""The pipeline's own parts: baselines from a model, traces that do not fit, replay."""

import numpy as np
import pytest

from collect.traces import Trace, TraceWriter
from collect.traces.layout import Split
from predictors.config import PredictorConfig
from predictors.registry import KINDS
from runtime.config import DenseFormat, ModelConfig
from runtime.errors import BudgetError
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.simulated import toy_accelerator
from tests.builders.traces import make_plan, make_spec, make_trace
from train.config import TrainConfig
from train.data import hold_out_unlearned
from train.errors import TrainError
from train.find_trace import find_trace, open_named_trace, require_model
from train.kinds import collect_signals, leave_out_kinds
from train.nonlearned import RouterWeights, make_skip
from train.record_training import LOGIN, hide_place
from train.replay import budget_slots, first_tokens

HARDWARE = toy_accelerator()


def test_skip__takes_the_routers_of_the_model(tmp_path) -> None:
    folder = tiny_qwen2_moe(tmp_path / "m", num_layers=3)
    spec = make_spec(num_layers=3, hidden_size=32)
    model = ModelConfig(name="tiny", id=str(folder), dtype="float32")
    routers = RouterWeights(model, spec)
    assert make_skip(routers, 3) is None
    hidden = np.random.default_rng(0).standard_normal((5, 32), dtype=np.float32)
    layers = plain_eager(folder).model.layers
    for target in (1, 2):
        (forecast,) = make_skip(routers, target).gate_input(0, hidden)
        weight = layers[target].mlp.gate.weight.numpy(force=True)
        expected = np.argsort(-(hidden @ weight.T), axis=1)[:, :2]
        assert np.array_equal(np.sort(forecast.chosen_TK(2)), np.sort(expected))


def test_skip__refuses_a_model_of_another_size(tmp_path) -> None:
    model = ModelConfig(name="tiny", id=str(tiny_qwen2_moe(tmp_path / "m")))
    with pytest.raises(TrainError, match=r"\(8, 32\).*needs one matrix \(8, 16\)"):
        make_skip(RouterWeights(model, make_spec(num_layers=2)), 1)


def test_trace_for__refuses_a_trace_of_another_model_naming_both(trace: Trace, tmp_path):
    model = ModelConfig(name="tiny", id=str(tiny_qwen2_moe(tmp_path / "m")))
    config = TrainConfig(model=model, trace=trace.path, run_dir=tmp_path)
    with pytest.raises(TrainError, match='model_id: the trace has "synthetic", model=tiny has'):
        find_trace(config, collect_signals(["skip"]))


def test_first_tokens__counts_what_was_generated(trace: Trace) -> None:
    taken = [step.num_tokens for step in first_tokens(trace.steps("held_out"), 2)]
    # A prompt of six, then generated tokens one by one.
    assert taken == [6, 1, 1]


def test_budget_slots__is_a_share_of_all_experts_or_refused() -> None:
    spec = make_spec()
    assert budget_slots("50%", spec, HARDWARE) == 16
    assert budget_slots("901", spec, HARDWARE) == 3
    with pytest.raises(BudgetError, match="least budget is 600"):
        budget_slots("1B", spec, HARDWARE)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_epochs", 0), ("batch_size", 1), ("lr", -1), ("weight_decay", -1), ("threads", 0)],
)
def test_config__names_the_key_and_the_allowed_values(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}: must be"):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(
    ("num_layers", "deep"),
    [(4, []), (3, ["expert-map"]), (2, ["stride"]), (1, ["mlp", "skip", "stride"])],
)
def test_deep_kinds__are_left_out_of_models_with_few_layers(num_layers, deep, tmp_path):
    trace = make_trace(tmp_path / "t", spec=make_spec(num_layers=num_layers))
    left_out = leave_out_kinds(PredictorConfig(kind="token"), KINDS, trace)
    assert set(deep) <= set(left_out) <= {*deep, "stride", "expert-map"}
    far = PredictorConfig(kind="skip", options={"horizon": num_layers})
    for config in (far, *(PredictorConfig(kind=kind) for kind in left_out)):
        with pytest.raises(TrainError, match=f"predictor={config.kind}: .* has {num_layers}"):
            leave_out_kinds(config, KINDS, trace)


@pytest.mark.parametrize("login", ["user", "user:password", "user:p@ssword", "me@here:p@ss@word"])
def test_hide_place__leaves_no_part_of_a_login(login: str) -> None:
    address = f"https://{login}@host/trace"
    assert hide_place({"trace": [address]}) == {"trace": ["https://host/trace"]}
    assert LOGIN.sub("", f"train trace={address} a=b@c") == "train trace=https://host/trace a=b@c"


def test_named_trace__a_mistyped_one_is_refused_with_what_is_there(tmp_path) -> None:
    trace = make_trace(tmp_path / "mine")
    assert open_named_trace(trace.path, ModelConfig()).digest == trace.digest
    with pytest.raises(TrainError) as refused:
        open_named_trace(tmp_path / "mien", ModelConfig(id="org/model"), key="shifted_trace")
    message = str(refused.value)
    assert f"shifted_trace={tmp_path / 'mien'} is not a trace. {tmp_path} has mine." in message
    assert f"moecast collect model.id=org/model output={tmp_path / 'mien'} records one" in message
    assert not (tmp_path / "mien").exists()


def test_named_trace__an_incomplete_one_is_refused(tmp_path) -> None:
    TraceWriter(tmp_path / "t", make_plan(make_spec()))
    with pytest.raises(TrainError, match="is an incomplete trace"):
        open_named_trace(tmp_path / "t", ModelConfig())


def test_named_trace__of_another_dense_format_is_refused(tmp_path, monkeypatch):
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


def test_hold_out_unlearned__leaves_out_what_is_trained_on(trace: Trace, tmp_path) -> None:
    learned = {request.digest for request in trace.request_table if request.split is Split.TRAIN}
    # The first forty requests are the trace's own.
    other = make_trace(tmp_path / "other", num_units=3)
    divided = hold_out_unlearned(other, trace, key="shifted_trace")
    indices = np.unique(divided.requests[divided.rows("held_out")])
    assert {other.request_table[index].digest for index in indices} == {
        request.digest for request in other.request_table
    } - learned
    (first, *_), name = trace.request_table, tmp_path / "one"
    assert first.split is Split.TRAIN
    one = make_trace(name, num_units=1, requests_per_unit=1)
    with pytest.raises(TrainError, match=f"every request of shifted_trace={name}"):
        hold_out_unlearned(one, trace, key="shifted_trace")
