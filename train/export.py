"""Networks as single-file ONNX graphs.

The graphs are written directly: torch's exporter takes seconds for each network and writes the
same few nodes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from predictors.learned import INPUT, OUTPUT
from predictors.residual import AFTER, CARRY, HIDDEN, MIX, SCORES, TOKEN, TOKEN_OUT

OPSET, IR_VERSION = 17, 9
"""Old enough for every onnxruntime since 1.16; the operators have not changed since."""

Shape = Sequence[int | str]
"""Sizes; a name where any number will do."""


def serialised(
    name: str,
    nodes: Sequence[NodeProto],
    *,
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    tensors: Mapping[str, NDArray],
) -> bytes:
    """A checked graph as the bytes of one file, the same bytes every time."""

    def declared(shapes: Mapping[str, Shape]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(key, TensorProto.FLOAT, shape)
            for key, shape in shapes.items()
        ]

    graph = helper.make_graph(
        list(nodes),
        name,
        declared(inputs),
        declared(outputs),
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


def network_graph(
    weight_DF: NDArray, bias_F: NDArray, weight_FE: NDArray, bias_E: NDArray, *, name: str
) -> bytes:
    """`hidden [batch, D]` to `scores [batch, E]`: Gemm, Relu, Gemm, Sigmoid."""
    return serialised(
        name,
        [
            helper.make_node("Gemm", [INPUT, "weight_in", "bias_in"], ["summed"]),
            helper.make_node("Relu", ["summed"], ["middle"]),
            helper.make_node("Gemm", ["middle", "weight_out", "bias_out"], ["logits"]),
            helper.make_node("Sigmoid", ["logits"], [OUTPUT]),
        ],
        inputs={INPUT: ["batch", weight_DF.shape[0]]},
        outputs={OUTPUT: ["batch", weight_FE.shape[1]]},
        tensors={
            "weight_in": weight_DF,
            "bias_in": bias_F,
            "weight_out": weight_FE,
            "bias_out": bias_E,
        },
    )


def skipping_graph(
    weight_XF: NDArray,
    bias_F: NDArray,
    weight_FE: NDArray,
    straight_XE: NDArray,
    bias_E: NDArray,
    *,
    name: str,
) -> bytes:
    """As `network_graph`, and a linear path beside it, both read in one product."""
    width, num_experts = weight_FE.shape
    return serialised(
        name,
        [
            helper.make_node("Gemm", [INPUT, "first", "first_bias"], ["summed"]),
            helper.make_node("Split", ["summed", "parts"], ["inward", "straight"], axis=1),
            helper.make_node("Relu", ["inward"], ["middle"]),
            helper.make_node("Gemm", ["middle", "weight_out", "straight"], ["logits"]),
            helper.make_node("Sigmoid", ["logits"], [OUTPUT]),
        ],
        inputs={INPUT: ["batch", weight_XF.shape[0]]},
        outputs={OUTPUT: ["batch", num_experts]},
        tensors={
            "first": np.concatenate([weight_XF, straight_XE], axis=1),
            "first_bias": np.concatenate([bias_F, bias_E]),
            "parts": np.array([width, num_experts], np.int64),
            "weight_out": weight_FE,
        },
    )


def residual_graph(
    weights: Mapping[str, NDArray], *, num_targets: int, decays: Sequence[float], name: str
) -> bytes:
    """`predictors.residual`'s graph: one pass over the hidden state for all that is made of it.

    `weights`, normalisation folded in: `state [D, G R]`, `in [D, F]`, `router [D, H E]`, their
    biases `state_bias`, `in_bias`, `out_bias`; `past [G R, F]`, `out [F, H E]`; `scale`, `shift`
    `[H, 1]`; `token [Q, F]`, or for the first source `token_out [D, Q]`, `token_out_bias`.
    """
    groups, (ranks, width) = len(decays), weights["past"].shape
    outputs = weights["out"].shape[1]
    num_experts, rank = outputs // num_targets, ranks // groups
    firsts = "token_out" in weights
    first = [weights["state"], weights["in"], weights["router"]]
    biases = [weights["state_bias"], weights["in_bias"], weights["out_bias"]]
    parts, sizes = ["states", "inward", "routed"], [ranks, width, outputs]
    if firsts:
        first.append(weights["token_out"])
        biases.append(weights["token_out_bias"])
        parts.append(TOKEN_OUT)
        sizes.append(len(biases[-1]))
    hidden = weights["past"]
    remembered = "by_token"
    nodes = [
        helper.make_node("Gemm", [HIDDEN, "first", "first_bias"], ["summed"]),
        helper.make_node("Split", ["summed", "parts"], parts, axis=1),
        helper.make_node("Reshape", ["states", "by_decay"], ["states_by_decay"]),
        helper.make_node("Transpose", ["states_by_decay"], ["state"], perm=[1, 0, 2]),
        helper.make_node("Concat", [CARRY, "state"], ["past_states"], axis=1),
        helper.make_node("MatMul", [MIX, "past_states"], ["context"]),
        helper.make_node("Mul", ["context", "decays"], ["faded"]),
        helper.make_node("Add", ["faded", "state"], [AFTER]),
        helper.make_node("Transpose", ["context"], ["context_by_token"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["context_by_token", "flat_context"], [remembered]),
    ]
    if not firsts:
        nodes.append(helper.make_node("Concat", [remembered, TOKEN], ["remembered"], axis=1))
        remembered, hidden = "remembered", np.concatenate([hidden, weights["token"]])
    nodes += [
        helper.make_node("Gemm", [remembered, "past", "inward"], ["whole"]),
        helper.make_node("Relu", ["whole"], ["middle"]),
        helper.make_node("Gemm", ["middle", "out", "routed"], ["flat"]),
        helper.make_node("Reshape", ["flat", "by_target"], ["logits"]),
        helper.make_node("LogSoftmax", ["logits"], ["shares"], axis=-1),
        helper.make_node("Mul", ["shares", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "shift"], ["shifted"]),
        helper.make_node("Sigmoid", ["shifted"], [SCORES]),
    ]
    token: dict[str, Shape] = {} if firsts else {TOKEN: ["tokens", len(weights["token"])]}
    token_out: dict[str, Shape] = {TOKEN_OUT: ["tokens", sizes[-1]]} if firsts else {}
    return serialised(
        name,
        nodes,
        inputs={
            HIDDEN: ["tokens", first[0].shape[0]],
            CARRY: [groups, "carried", rank],
            MIX: [groups, "tokens", "carried_and_tokens"],
            **token,
        },
        outputs={
            SCORES: ["tokens", num_targets, num_experts],
            AFTER: [groups, "tokens", rank],
            **token_out,
        },
        tensors={
            "first": np.concatenate(first, axis=1),
            "first_bias": np.concatenate(biases),
            "parts": np.array(sizes, np.int64),
            "by_decay": np.array([-1, groups, rank], np.int64),
            "decays": np.array(decays, np.float32)[:, None, None],
            "flat_context": np.array([-1, ranks], np.int64),
            "past": hidden,
            "out": weights["out"],
            "by_target": np.array([-1, num_targets, num_experts], np.int64),
            "scale": weights["scale"],
            "shift": weights["shift"],
        },
    )
