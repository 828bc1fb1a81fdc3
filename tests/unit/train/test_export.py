"""ONNX graphs against torch on the same inputs."""

import numpy as np
import onnx
import pytest
import torch

from tests.builders.traces import make_spec
from train.errors import ParityError
from train.export import LEAST_PARITY, export, parity
from train.networks import NetworkStack, edges

SPEC = make_spec(num_layers=3)
EDGES = edges(SPEC, ("mlp", "stride"))


def random_stack() -> NetworkStack:
    torch.manual_seed(0)
    stack = NetworkStack(len(EDGES), SPEC, width=24)
    with torch.no_grad():
        stack.weight_out_NFE.mul_(20)
    stack.normalise_by(torch.randn(len(EDGES), 50, SPEC.hidden_size))
    return stack


def batches() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shape = (SPEC.num_layers, 100, SPEC.hidden_size)
    return [random.standard_normal(shape, dtype=np.float32) for _ in range(2)]


@pytest.mark.parametrize("num_tokens", [1, 3, 257])
def test_export__answers_as_torch_for_any_number_of_tokens(num_tokens: int) -> None:
    stack = random_stack()
    exported = export(stack, EDGES, SPEC)
    hidden = torch.randn(num_tokens, SPEC.hidden_size)
    with torch.no_grad():
        expected = stack(hidden.expand(len(EDGES), -1, -1)).sigmoid()
    for n, edge in enumerate(EDGES):
        (forecast,) = exported[edge.kind].gate_input(edge.source, hidden.numpy())
        assert forecast.layer == edge.target
        np.testing.assert_allclose(forecast.scores_TE, expected[n].numpy(), atol=1e-5)


def test_export__is_one_plain_file_of_four_operators() -> None:
    for data in export(random_stack(), EDGES, SPEC)["mlp"].files().values():
        graph = onnx.load_model_from_string(data).graph
        assert [node.op_type for node in graph.node] == ["Gemm", "Relu", "Gemm", "Sigmoid"]
        assert not any(tensor.external_data for tensor in graph.initializer)


def test_export__is_the_same_bytes_every_time() -> None:
    assert (
        export(random_stack(), EDGES, SPEC)["mlp"].files()
        == export(random_stack(), EDGES, SPEC)["mlp"].files()
    )


def test_parity__finds_the_same_sets_on_every_token() -> None:
    stack = random_stack()
    found = parity(stack, EDGES, export(stack, EDGES, SPEC), batches(), top_k=2)
    assert (found["mlp"].tokens, found["stride"].tokens) == (400, 200)
    assert found["mlp"].same_top_k >= LEAST_PARITY
    assert found["mlp"].max_abs_difference < 1e-5


def test_parity__refuses_networks_that_answer_otherwise() -> None:
    stack = random_stack()
    exported = export(stack, EDGES, SPEC)
    with torch.no_grad():
        stack.weight_out_NFE[-1].neg_()
    with pytest.raises(ParityError, match=r"stride networks.*at least 99.9%"):
        parity(stack, EDGES, exported, batches(), top_k=2)
