"""Networks of eight bits: what enters them is normalised before it is rounded."""

import numpy as np
import onnxruntime

from train.export import network_graph, quantise_graph

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
    weights = (
        folded_DF,
        -mean_D @ folded_DF,
        RANDOM.standard_normal((32, 8), np.float32),
        np.zeros(8, np.float32),
    )
    expected = np.maximum(normal_TD @ weight_DF, 0) @ weights[2]
    expected = 1 / (1 + np.exp(-expected))
    graph = network_graph(*weights, name="n", normaliser=(mean_D, deviation_D))
    silent = network_graph(*weights, name="n")
    np.testing.assert_allclose(answers(graph, hidden_TD), expected, atol=1e-3)
    error = np.abs(answers(quantise_graph(graph), hidden_TD) - expected).mean()
    error_silent = np.abs(answers(quantise_graph(silent), hidden_TD) - expected).mean()
    assert error < 0.02
    assert error_silent > 3 * error
