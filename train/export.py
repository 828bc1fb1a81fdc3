"""From the trained stack to one single-file ONNX graph for each network, and the proof of parity.

The graph (Gemm, Relu, Gemm, Sigmoid) is written directly: torch's exporter takes seconds for each
network and writes the same four nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from predictors.base import Floats
from predictors.learned import INPUT, OUTPUT, Learned
from predictors.registry import LEARNED
from predictors.spec import ModelSpec
from train.errors import ParityError
from train.networks import Edge, NetworkStack

OPSET, IR_VERSION = 17, 9
"""Old enough for every onnxruntime since 1.16; the four operators have not changed since."""

LEAST_PARITY = 0.999
"""Share of held-out tokens on which torch and onnxruntime must choose the same top_k set."""


@dataclass(frozen=True)
class Parity:
    """Agreement of the exported networks with torch on held-out tokens."""

    tokens: int
    """(token, network) pairs compared."""
    same_top_k: float
    max_abs_difference: float
    """Of the scores, which lie in [0, 1]."""


def network_graph(
    weight_DF: NDArray, bias_F: NDArray, weight_FE: NDArray, bias_E: NDArray, *, name: str
) -> bytes:
    """`hidden [batch, D]` to `scores [batch, E]` as the bytes of one ONNX file."""
    tensors = {
        "weight_in": weight_DF,
        "bias_in": bias_F,
        "weight_out": weight_FE,
        "bias_out": bias_E,
    }
    nodes = [
        helper.make_node("Gemm", [INPUT, "weight_in", "bias_in"], ["summed"]),
        helper.make_node("Relu", ["summed"], ["middle"]),
        helper.make_node("Gemm", ["middle", "weight_out", "bias_out"], ["logits"]),
        helper.make_node("Sigmoid", ["logits"], [OUTPUT]),
    ]
    hidden, experts = weight_DF.shape[0], weight_FE.shape[1]
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["batch", hidden])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", experts])],
        [numpy_helper.from_array(array, key) for key, array in tensors.items()],
    )
    model = helper.make_model(
        graph,
        producer_name="moecast",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def export(stack: NetworkStack, edges: list[Edge], spec: ModelSpec) -> dict[str, Learned]:
    """The run-time predictors of every kind in the stack."""
    graphs: dict[str, dict[int, bytes]] = {}
    for number, edge in enumerate(edges):
        arrays = [tensor.cpu().numpy() for tensor in stack.plain_weights(number)]
        name = f"{edge.kind}_{edge.source}_to_{edge.target}"
        graphs.setdefault(edge.kind, {})[edge.source] = network_graph(*arrays, name=name)
    return {kind: LEARNED[kind](spec, own) for kind, own in graphs.items()}


def parity(
    stack: NetworkStack,
    edges: list[Edge],
    exported: Mapping[str, Learned],
    batches: Iterable[Floats],
    *,
    top_k: int,
) -> dict[str, Parity]:
    """Compares scores of torch and onnxruntime; `batches` yields gate inputs `[L, B, D]`.

    Raises ParityError when a kind's top_k sets agree on less than `LEAST_PARITY` of the tokens.
    """
    same: dict[str, int] = dict.fromkeys(exported, 0)
    seen: dict[str, int] = dict.fromkeys(exported, 0)
    worst: dict[str, float] = dict.fromkeys(exported, 0.0)
    for hidden_LBD in batches:
        sources = [edge.source for edge in edges]
        with torch.no_grad():
            expected_NBE = stack(torch.from_numpy(hidden_LBD[sources])).sigmoid().numpy()
        for expected_BE, edge in zip(expected_NBE, edges, strict=True):
            (forecast,) = exported[edge.kind].gate_input(edge.source, hidden_LBD[edge.source])
            same[edge.kind] += same_sets(expected_BE, forecast.scores_TE, top_k)
            seen[edge.kind] += len(expected_BE)
            gap = float(np.abs(expected_BE - forecast.scores_TE).max(initial=0.0))
            worst[edge.kind] = max(worst[edge.kind], gap)
    found = {kind: Parity(seen[kind], same[kind] / seen[kind], worst[kind]) for kind in exported}
    for kind, one in found.items():
        if one.same_top_k < LEAST_PARITY:
            raise ParityError(
                f"the exported {kind} networks choose torch's top {top_k} on "
                f"{one.same_top_k:.4%} of {one.tokens:,} tokens; at least {LEAST_PARITY:.1%} must"
            )
    return found


def same_sets(one_BE: Floats, other_BE: Floats, top_k: int) -> int:
    """Rows on which both choose the same `top_k` experts, in whatever order."""
    best = [np.argsort(-one, axis=1, kind="stable")[:, :top_k] for one in (one_BE, other_BE)]
    return int((np.sort(best[0]) == np.sort(best[1])).all(axis=1).sum())
