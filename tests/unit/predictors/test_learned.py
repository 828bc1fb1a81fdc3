"""Learned predictors at run time, with networks whose answer is known."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from predictors.errors import PredictorError
from predictors.learned import MlpPredictor, StridePredictor, graph_path
from predictors.networks.network import open_network
from predictors.registry import load_from_files
from predictors.spec import ModelSpec
from tests.builders.traces import make_spec
from train.export import network_graph
from zoo.entry import check_graph
from zoo.errors import ZooError


def graph(spec: ModelSpec, *, favourite: int) -> bytes:
    """A network that scores one expert by the first feature: sigmoid(x0) if x0 > 0, else 1/2."""
    weight_in = np.zeros((spec.hidden_size, 4), np.float32)
    weight_in[0, 0] = 1.0
    weight_out = np.zeros((4, spec.num_experts), np.float32)
    weight_out[0, favourite] = 1.0
    zeros = np.zeros(4, np.float32), np.zeros(spec.num_experts, np.float32)
    return network_graph(weight_in, zeros[0], weight_out, zeros[1], name="test")


def hidden(spec: ModelSpec, *first: float) -> np.ndarray:
    values = np.zeros((len(first), spec.hidden_size), np.float32)
    values[:, 0] = first
    return values


def test_mlp__forecasts_the_next_layer() -> None:
    spec = make_spec(num_layers=3)
    mlp = MlpPredictor(spec, {0: graph(spec, favourite=3), 1: graph(spec, favourite=5)})
    (forecast,) = mlp.gate_input(1, hidden(spec, 2.0, -1.0))
    expected = np.full((2, spec.num_experts), 0.5, np.float32)
    expected[0, 5] = 1 / (1 + np.exp(-2.0))
    assert forecast.layer == 2
    np.testing.assert_allclose(forecast.scores_TE, expected, rtol=1e-6)
    assert not mlp.gate_input(2, hidden(spec, 1.0))


def test_stride__forecasts_the_layer_after_the_next() -> None:
    spec = make_spec(num_layers=3)
    (forecast,) = StridePredictor(spec, {0: graph(spec, favourite=1)}).gate_input(
        0, hidden(spec, 3.0)
    )
    assert (forecast.layer, forecast.chosen_TK(1).tolist()) == (2, [[1]])


def test_learned__takes_rows_that_are_not_contiguous() -> None:
    spec = make_spec(num_layers=3)
    stride = StridePredictor(spec, {0: graph(spec, favourite=1)})
    wide = hidden(spec, 1.0, 2.0, 3.0, 4.0)
    (forecast,) = stride.gate_input(0, wide[::2])
    (expected,) = stride.gate_input(0, wide[::2].copy())
    np.testing.assert_array_equal(forecast.scores_TE, expected.scores_TE)


def test_learned__goes_into_files_and_back() -> None:
    spec = make_spec(num_layers=3)
    stride = StridePredictor(spec, {0: graph(spec, favourite=1)})
    assert set(stride.files()) == {graph_path(0, 2)}
    again = load_from_files("stride", spec, files=stride.files(), options=stride.options())
    assert again.files() == stride.files()


def test_learned__refuses_networks_of_another_shape_naming_both() -> None:
    spec = make_spec(num_layers=3)
    stride = StridePredictor(spec, {0: graph(spec, favourite=1)})
    other = make_spec(num_layers=3, num_experts=12)
    with pytest.raises(PredictorError, match=r"\[8\].*needs.*\[12\]"):
        load_from_files("stride", other, files=stride.files(), options=stride.options())


def test_learned__refuses_missing_networks_and_another_horizon() -> None:
    spec = make_spec(num_layers=3)
    files = {graph_path(0, 1): graph(spec, favourite=1)}
    with pytest.raises(PredictorError, match=graph_path(1, 2)):
        load_from_files("mlp", spec, files=files, options={"horizon": 1})
    with pytest.raises(PredictorError, match="horizon 2.*made with 1"):
        load_from_files("stride", spec, files=files, options={"horizon": 1})


def test_learned__refuses_bytes_that_are_no_network() -> None:
    with pytest.raises(PredictorError, match="onnxruntime cannot load"):
        StridePredictor(make_spec(num_layers=3), {0: b"not a graph"})


def test_registry__imports_neither_torch_nor_onnxruntime() -> None:
    check = (
        "import sys, predictors.registry; assert not {'torch', 'onnxruntime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def one_node(*nodes: onnx.NodeProto, kind: int = TensorProto.FLOAT) -> bytes:
    """A network `[T, 4]` to `[T, 8]` of these operators after a product."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["hidden", "w"], ["logits"]), *nodes],
        "test",
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["T", 4])],
        [helper.make_tensor_value_info("scores", kind, ["T", 8])],
        [numpy_helper.from_array(np.eye(4, 8, dtype=np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (one_node(helper.make_node("Log", ["logits"], ["scores"])), "infinities or NaN"),
        (
            one_node(
                helper.make_node("Cast", ["logits"], ["scores"], to=TensorProto.DOUBLE),
                kind=TensorProto.DOUBLE,
            ),
            "gives float64; expected float32",
        ),
        (
            one_node(
                helper.make_node("Constant", [], ["by"], value_ints=[7, 3]),
                helper.make_node("Reshape", ["logits", "by"], ["scores"]),
            ),
            "cannot be run",
        ),
    ],
)
def test_session__a_network_that_fails_its_trial_is_refused(graph: bytes, message: str) -> None:
    with pytest.raises(PredictorError, match=message):
        open_network(graph)


def endless_loop() -> bytes:
    """A network whose loop runs 2^62 times."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["state", "state"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["T", 8]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, ["T", 8]),
        ],
    )
    return one_node(
        helper.make_node("Constant", [], ["times"], value_int=2**62),
        helper.make_node("Loop", ["times", "", "logits"], ["scores"], body=body),
    )


def test_session__a_network_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictors.networks.network.TRIAL_SECONDS", 0.2)
    with pytest.raises(PredictorError, match="cannot be run.*terminate"):
        open_network(endless_loop())


def test_check_graph__refuses_control_flow_and_other_types() -> None:
    with pytest.raises(ZooError, match="uses the operators Constant, Loop; predictors"):
        check_graph(endless_loop(), what="it")
    hidden = helper.make_node(
        "Relu", ["logits"], ["scores"], value=numpy_helper.from_array(np.eye(4))
    )
    with pytest.raises(ZooError, match=r"within its operators \(\['t'\]\)"):
        check_graph(one_node(hidden), what="it")
    cast = helper.make_node("Cast", ["logits"], ["scores"], to=TensorProto.DOUBLE)
    with pytest.raises(ZooError, match="'scores' is of type DOUBLE"):
        check_graph(one_node(cast, kind=TensorProto.DOUBLE), what="it")
