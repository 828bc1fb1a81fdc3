"""Learned predictors at run time, with networks whose answer is known."""

import numpy as np
import pytest

from predictors.errors import PredictorError
from predictors.learned import MlpPredictor, StridePredictor, graph_path
from predictors.registry import load_from_files
from tests.builders.processes import run_python
from tests.builders.traces import make_spec
from train.export import network_graph

SPEC = make_spec(num_layers=3)


def graph(favourite: int) -> bytes:
    """A network that scores one expert by the first feature: sigmoid(x0) if x0 > 0, else 1/2."""
    weight_in = np.zeros((SPEC.hidden_size, 4), np.float32)
    weight_in[0, 0] = 1.0
    weight_out = np.zeros((4, SPEC.num_experts), np.float32)
    weight_out[0, favourite] = 1.0
    zeros = np.zeros(4, np.float32), np.zeros(SPEC.num_experts, np.float32)
    return network_graph(weight_in, zeros[0], weight_out, zeros[1], name="test")


def hidden(*first: float) -> np.ndarray:
    values = np.zeros((len(first), SPEC.hidden_size), np.float32)
    values[:, 0] = first
    return values


def test_mlp__forecasts_the_next_layer() -> None:
    mlp = MlpPredictor(SPEC, {0: graph(3), 1: graph(5)})
    (forecast,) = mlp.gate_input(1, hidden(2.0, -1.0))
    expected = np.full((2, SPEC.num_experts), 0.5, np.float32)
    expected[0, 5] = 1 / (1 + np.exp(-2.0))
    assert forecast.layer == 2
    np.testing.assert_allclose(forecast.scores_TE, expected, rtol=1e-6)
    assert not mlp.gate_input(2, hidden(1.0))


def test_learned__takes_rows_that_are_not_contiguous_and_goes_into_files_and_back() -> None:
    stride = StridePredictor(SPEC, {0: graph(1)})
    assert set(stride.files()) == {graph_path(0, 2)}
    loaded = load_from_files("stride", SPEC, files=stride.files(), options=stride.options())
    wide = hidden(1.0, 2.0, 3.0, 4.0)
    (forecast,) = loaded.gate_input(0, wide[::2])
    (expected,) = stride.gate_input(0, wide[::2].copy())
    np.testing.assert_array_equal(forecast.scores_TE, expected.scores_TE)


def test_learned__refuses_networks_of_another_shape_naming_both() -> None:
    stride = StridePredictor(SPEC, {0: graph(1)})
    other = make_spec(num_layers=3, num_experts=12)
    with pytest.raises(PredictorError, match=r"\[8\].*needs.*\[12\]"):
        load_from_files("stride", other, files=stride.files(), options=stride.options())


def test_learned__refuses_missing_networks_and_another_horizon() -> None:
    files = {graph_path(0, 1): graph(1)}
    for kind, message in (("mlp", graph_path(1, 2)), ("stride", "horizon 2.*made with 1")):
        with pytest.raises(PredictorError, match=message):
            load_from_files(kind, SPEC, files=files, options={"horizon": 1})


def test_registry__imports_neither_torch_nor_onnxruntime() -> None:
    slow = "{'torch', 'onnxruntime'}"
    run_python("-c", f"import sys, predictors.registry; assert not {slow} & set(sys.modules)")
