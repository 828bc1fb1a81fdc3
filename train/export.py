"""Networks as single-file ONNX graphs, optionally with eight-bit weights.

The graphs are written directly: torch's exporter takes seconds for each network and writes the
same few nodes. Quantised, they are a quarter of the size, and faster where memory bandwidth limits
a prediction. Weights are rounded once, per output; inputs at run time, per call. A few features of
a hidden state are far from zero or far larger than the others and would leave these only a few of
the 256 steps, so inputs are normalised first: without it a residual network that reads a layer's
own input falls from .908 to .855.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from predictors.base import Predictor
from predictors.learned import INPUT, OUTPUT
from predictors.residual import CHOSEN, HIDDEN, MEMORY, SCORES, STATE, TOKEN
from predictors.reuse import MEANS

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
        held = (array.astype(np.float32) for array in normaliser)
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


def network_graph(*weights: NDArray, name: str, normaliser: Normaliser | None = None) -> bytes:
    """`hidden [batch, D]` to `scores [batch, E]`: Gemm, Relu, Gemm, Sigmoid.

    `weights`: `[D, F]`, `[F]`, `[F, E]`, `[E]`.
    """
    names = ("weight_in", "bias_in", "weight_out", "bias_out")
    return graph_bytes(
        name,
        [
            helper.make_node("Gemm", [INPUT, "weight_in", "bias_in"], ["summed"]),
            helper.make_node("Relu", ["summed"], ["middle"]),
            helper.make_node("Gemm", ["middle", "weight_out", "bias_out"], ["logits"]),
            helper.make_node("Sigmoid", ["logits"], [OUTPUT]),
        ],
        inputs={INPUT: ["batch", len(weights[0])]},
        outputs={OUTPUT: ["batch", len(weights[3])]},
        tensors=dict(zip(names, weights, strict=True)),
        normaliser=normaliser,
    )


def reuse_graph(weights: Mapping[str, NDArray], *, name: str, normaliser: Normaliser) -> bytes:
    """`predictors.reuse`'s graph: a hidden layer and a linear path, both on the same numbers.

    `weights`: `pool [D, R]`, its normalisation folded in, and its bias; of the R numbers of the
    hidden state and the normalised fading means `from_pool [R, F + E]`, `from_means [X, F + E]` and
    `bias`, the hidden layer's columns first; `means_centre` and `means_factor` `[X]`; `out [F, E]`.
    """
    width, num_experts = weights["out"].shape
    return graph_bytes(
        name,
        [
            helper.make_node("Gemm", [INPUT, "pool", "pool_bias"], ["pooled"]),
            helper.make_node("Sub", [MEANS, "means_centre"], ["centred_means"]),
            helper.make_node("Mul", ["centred_means", "means_factor"], ["normal_means"]),
            helper.make_node("Gemm", ["normal_means", "from_means", "bias"], ["past"]),
            helper.make_node("Gemm", ["pooled", "from_pool", "past"], ["summed"]),
            helper.make_node("Split", ["summed", "parts"], ["inward", "straight"], axis=1),
            helper.make_node("Relu", ["inward"], ["middle"]),
            helper.make_node("Gemm", ["middle", "out", "straight"], ["logits"]),
            helper.make_node("Sigmoid", ["logits"], [OUTPUT]),
        ],
        inputs={
            INPUT: ["batch", len(weights["pool"])],
            MEANS: ["batch", len(weights["from_means"])],
        },
        outputs={OUTPUT: ["batch", num_experts]},
        tensors={**weights, "parts": np.array([width, num_experts], np.int64)},
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
    `shift` `[H, 1]`; for the first source `token [D, Q]`, `token_bias`, and no Q in `memory`; for
    the others `low [D, S]`, `low_bias` and `by_expert [E, S, H E]`.
    """
    outputs = weights["out"].shape[1]
    is_first = "token" in weights
    made = {"state": STATE, "in": "inward", "router": "routed"}
    made |= {"token": TOKEN} if is_first else {"low": "low"}
    biases = [weights["out_bias" if key == "router" else f"{key}_bias"] for key in made]
    sizes = dict(zip(made.values(), map(len, biases), strict=True))
    chosen = [
        helper.make_node("Einsum", [CHOSEN, "low", BY_EXPERT], ["seen"], equation="te,tk,ekn->tn"),
        helper.make_node("Add", ["routed", "seen"], ["straight"]),
    ]
    nodes = [
        helper.make_node("Gemm", [HIDDEN, "first", "first_bias"], ["summed"]),
        helper.make_node("Split", ["summed", "parts"], [*sizes], axis=1),
        helper.make_node("Gemm", [MEMORY, "memory_in", "inward"], ["whole"]),
        helper.make_node("Relu", ["whole"], ["middle"]),
        *([] if is_first else chosen),
        helper.make_node("Gemm", ["middle", "out", "routed" if is_first else "straight"], ["flat"]),
        helper.make_node("Reshape", ["flat", "by_target"], ["logits"]),
        helper.make_node("LogSoftmax", ["logits"], ["shares"], axis=-1),
        helper.make_node("Mul", ["shares", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "shift"], ["shifted"]),
        helper.make_node("Sigmoid", ["shifted"], [SCORES]),
    ]
    num_experts = outputs // num_targets
    answers: dict[str, Shape] = {
        name: ["tokens", sizes[name]] for name in (STATE, TOKEN) if name in sizes
    }
    return graph_bytes(
        name,
        nodes,
        inputs={
            HIDDEN: ["tokens", len(weights["in"])],
            MEMORY: ["tokens", len(weights["memory"])],
            **({} if is_first else {CHOSEN: ["tokens", num_experts]}),
        },
        outputs={SCORES: ["tokens", num_targets, num_experts], **answers},
        tensors={
            "first": np.concatenate([weights[key] for key in made], axis=1),
            "first_bias": np.concatenate(biases),
            **({} if is_first else {BY_EXPERT: weights["by_expert"]}),
            "parts": np.array(list(sizes.values()), np.int64),
            "memory_in": weights["memory"],
            "out": weights["out"],
            "by_target": np.array([-1, num_targets, num_experts], np.int64),
            "scale": weights["scale"],
            "shift": weights["shift"],
        },
        normaliser=normaliser,
    )


SUFFIX = ".onnx"
BY_EXPERT = "by_expert"
"""Weights `[E, S, N]` of an Einsum: a matrix for each expert."""


def quantise_graph(data: bytes) -> bytes:
    """The graph with its constant products in eight bits; inputs and outputs as they were."""
    model = onnx.load_model_from_string(data)
    # Shapes of inner values, which the rewriting would contradict.
    del model.graph.value_info[:]
    normalise_first(model.graph)
    round_by_expert(model.graph)
    # There is nothing to fold or fuse beforehand, and nothing to warn of.
    helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "graph.onnx")
        quantize_dynamic(model, output, weight_type=QuantType.QInt8, per_channel=True)
        return output.read_bytes()


def normalise_first(graph: onnx.GraphProto) -> None:
    """Takes the normalisation out of the first product's weights, and puts it before the product.

    A graph that does not say how it was normalised stays as it is.
    """
    held = {tensor.name: tensor for tensor in graph.initializer}
    if MEAN not in held:
        return
    first = next(node for node in graph.node if node.op_type == "Gemm")
    entering, weights, bias = first.input
    mean_D, deviation_D = (numpy_helper.to_array(held[key]) for key in (MEAN, DEVIATION))
    weight_DF = numpy_helper.to_array(held[weights]).astype(np.float64)
    bias_F = numpy_helper.to_array(held[bias]) + mean_D @ weight_DF
    changed = {
        weights: weight_DF * deviation_D[:, None],
        bias: bias_F,
        # Dividing is several times as slow as multiplying.
        DEVIATION: 1 / deviation_D,
    }
    for name, array in changed.items():
        held[name].CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))
    first.input[0] = "normal"
    graph.node.insert(0, helper.make_node("Mul", ["centred", DEVIATION], ["normal"]))
    graph.node.insert(0, helper.make_node("Sub", [entering, MEAN], ["centred"]))


def round_by_expert(graph: onnx.GraphProto) -> None:
    """Rounds an Einsum's weights to eight bits, with a scale per output that follows it.

    onnxruntime's quantisation knows products of two factors only.
    """
    for place, node in enumerate(graph.node):
        if node.op_type != "Einsum":
            continue
        (held,) = (tensor for tensor in graph.initializer if tensor.name == node.input[2])
        weight_ESN = numpy_helper.to_array(held)
        scale_N = np.maximum(np.abs(weight_ESN).max(axis=(0, 1)) / 127, np.float32(1e-12))
        rounded = np.rint(weight_ESN / scale_N).astype(np.int8)
        held.CopyFrom(numpy_helper.from_array(rounded, held.name))
        graph.initializer.append(numpy_helper.from_array(scale_N, f"{held.name}_scale"))
        seen, whole = node.output[0], f"{node.output[0]}_whole"
        node.input[2], node.output[0] = f"{held.name}_float", whole
        cast = helper.make_node("Cast", [held.name], [f"{held.name}_float"], to=TensorProto.FLOAT)
        scaled = helper.make_node("Mul", [whole, f"{held.name}_scale"], [seen])
        graph.node.insert(place + 1, scaled)
        graph.node.insert(place, cast)
        return


def quantise(predictor: Predictor) -> Predictor:
    """The same predictor with eight-bit networks; one without networks comes back as it is."""
    files = predictor.files()
    if not any(path.endswith(SUFFIX) for path in files):
        return predictor
    smaller = {
        path: quantise_graph(data) if path.endswith(SUFFIX) else data
        for path, data in files.items()
    }
    return type(predictor).from_files(predictor.spec, smaller, predictor.options())
