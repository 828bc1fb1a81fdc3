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
from predictors.residual import HIDDEN, MEMORY, SCORES, STATE, TOKEN

OPSET, IR_VERSION = 17, 9
"""Old enough for every onnxruntime since 1.16; the operators have not changed since."""

MEAN, DEVIATION = "entering_mean", "entering_deviation"
"""Tensors that no node of a graph uses: mean and deviation of each input feature of the first
product, in whose weights they are folded. Quantising that product's inputs needs them."""

Normaliser = tuple[NDArray, NDArray]
"""`([D], [D])`: mean and deviation of the features that enter."""

Shape = Sequence[int | str]
"""Sizes; a name where any number will do."""


def graph_bytes(
    name: str,
    nodes: Sequence[NodeProto],
    *,
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    tensors: Mapping[str, NDArray],
    normaliser: Normaliser | None = None,
) -> bytes:
    """A checked graph as the bytes of one file, the same bytes every time."""
    if normaliser is not None:
        held = (one.astype(np.float32) for one in normaliser)
        tensors = {**tensors, **dict(zip((MEAN, DEVIATION), held, strict=True))}

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
    weight_DF: NDArray,
    bias_F: NDArray,
    weight_FE: NDArray,
    bias_E: NDArray,
    *,
    name: str,
    normaliser: Normaliser | None = None,
) -> bytes:
    """`hidden [batch, D]` to `scores [batch, E]`: Gemm, Relu, Gemm, Sigmoid."""
    return graph_bytes(
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
        normaliser=normaliser,
    )


def skipping_graph(
    weight_XF: NDArray,
    bias_F: NDArray,
    weight_FE: NDArray,
    straight_XE: NDArray,
    bias_E: NDArray,
    *,
    name: str,
    normaliser: Normaliser | None = None,
) -> bytes:
    """Build `network_graph` with a parallel linear path; one product reads both."""
    width, num_experts = weight_FE.shape
    return graph_bytes(
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
        normaliser=normaliser,
    )


def residual_graph(
    weights: Mapping[str, NDArray],
    *,
    num_targets: int,
    name: str,
    normaliser: Normaliser | None = None,
) -> bytes:
    """`predictors.residual`'s graph: one pass over the hidden state for all that is made of it.

    `weights`, normalisation folded in: `state [D, X]`, `in [D, F]`, `router [D, H E]`, their
    biases `state_bias`, `in_bias`, `out_bias`; `memory [X + Q, F]`, `out [F, H E]`; `scale`,
    `shift` `[H, 1]`; for the first source `token_out [D, Q]`, `token_out_bias`, and no Q in
    `memory`.
    """
    outputs = weights["out"].shape[1]
    first = [weights["state"], weights["in"], weights["router"]]
    biases = [weights["state_bias"], weights["in_bias"], weights["out_bias"]]
    parts = [STATE, "inward", "routed"]
    if "token_out" in weights:
        first.append(weights["token_out"])
        biases.append(weights["token_out_bias"])
        parts.append(TOKEN)
    sizes = dict(zip(parts, map(len, biases), strict=True))
    nodes = [
        helper.make_node("Gemm", [HIDDEN, "first", "first_bias"], ["summed"]),
        helper.make_node("Split", ["summed", "parts"], parts, axis=1),
        helper.make_node("Gemm", [MEMORY, "memory_in", "inward"], ["whole"]),
        helper.make_node("Relu", ["whole"], ["middle"]),
        helper.make_node("Gemm", ["middle", "out", "routed"], ["flat"]),
        helper.make_node("Reshape", ["flat", "by_target"], ["logits"]),
        helper.make_node("LogSoftmax", ["logits"], ["shares"], axis=-1),
        helper.make_node("Mul", ["shares", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "shift"], ["shifted"]),
        helper.make_node("Sigmoid", ["shifted"], [SCORES]),
    ]
    num_experts = outputs // num_targets
    answers: dict[str, Shape] = {
        one: ["tokens", sizes[one]] for one in (STATE, TOKEN) if one in sizes
    }
    return graph_bytes(
        name,
        nodes,
        inputs={
            HIDDEN: ["tokens", first[0].shape[0]],
            MEMORY: ["tokens", len(weights["memory"])],
        },
        outputs={SCORES: ["tokens", num_targets, num_experts], **answers},
        tensors={
            "first": np.concatenate(first, axis=1),
            "first_bias": np.concatenate(biases),
            "parts": np.array(list(sizes.values()), np.int64),
            "memory_in": weights["memory"],
            "out": weights["out"],
            "by_target": np.array([-1, num_targets, num_experts], np.int64),
            "scale": weights["scale"],
            "shift": weights["shift"],
        },
        normaliser=normaliser,
    )
