"""ONNX graphs against torch on the same inputs, and those of eight bits."""

import numpy as np
import onnxruntime
import pytest
import torch

from collect.traces import TraceSignal
from tests.builders.traces import make_spec
from train.data import Batch
from train.errors import ParityError
from train.export import network_graph, quantise_graph
from train.networks import PlainStack, network_specs
from train.pipeline import check_parity

SPEC = make_spec(num_layers=3)
EDGES = network_specs(SPEC, ("mlp", "stride", "pre-attention"))


def random_family() -> PlainStack:
    torch.manual_seed(0)
    family = PlainStack(SPEC, EDGES, width=24, loss="bce")
    with torch.no_grad():
        family.stack.weight_out_NFE.mul_(20)
    family.normalise_by(batch(50))
    return family


def batch(num_tokens: int) -> Batch:
    random = torch.Generator().manual_seed(0)
    shape = SPEC.num_layers, num_tokens, SPEC.hidden_size
    chosen = torch.zeros(SPEC.num_layers, num_tokens, SPEC.top_k, dtype=torch.int64)
    signals = TraceSignal.GATE_INPUT, TraceSignal.LAYER_INPUT
    return Batch(chosen, {signal: torch.randn(shape, generator=random) for signal in signals})


def test_parity__refuses_networks_that_answer_otherwise() -> None:
    family = random_family()
    exported = family.export(SPEC)
    stride = next(n for n, edge in enumerate(EDGES) if edge.kind == "stride")
    with torch.no_grad():
        family.stack.weight_out_NFE[stride].neg_()
    with pytest.raises(ParityError, match=r"stride networks.*at least 99.9%"):
        check_parity(family, exported, [batch(100)])


RANDOM = np.random.default_rng(0)


def answers(graph: bytes, hidden_TD: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(graph)
    return np.concatenate([session.run(None, {"hidden": row[None]})[0] for row in hidden_TD])


def test_quantised__tolerates_large_and_shifted_features() -> None:
    normal_TD = RANDOM.standard_normal((300, 64), np.float32)
    mean_D, deviation_D = np.zeros(64, np.float32), np.ones(64, np.float32)
    mean_D[3], deviation_D[5] = 200.0, 100.0
    hidden_TD = normal_TD * deviation_D + mean_D
    weight_DF = RANDOM.standard_normal((64, 32), np.float32) / 8
    folded_DF = weight_DF / deviation_D[:, None]
    out_FE = RANDOM.standard_normal((32, 8), np.float32)
    weights = folded_DF, -mean_D @ folded_DF, out_FE, np.zeros(8, np.float32)
    expected = 1 / (1 + np.exp(-(np.maximum(normal_TD @ weight_DF, 0) @ out_FE)))
    graph = network_graph(*weights, name="n", normaliser=(mean_D, deviation_D))
    silent = network_graph(*weights, name="n")
    np.testing.assert_allclose(answers(graph, hidden_TD), expected, atol=1e-3)
    error = np.abs(answers(quantise_graph(graph), hidden_TD) - expected).mean()
    assert error < 0.02
    assert np.abs(answers(quantise_graph(silent), hidden_TD) - expected).mean() > 3 * error
