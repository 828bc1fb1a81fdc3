"""Exported predictors with eight-bit weights: a quarter of the bytes, and faster where memory is
what a prediction waits for.

Weights are rounded once, for each output of a layer by itself; inputs at run time, each call by
its own range. The accuracy is another one and is measured again: what is scored is what ships.
"""

import tempfile
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

from predictors.base import Predictor

SUFFIX = ".onnx"


def quantised_graph(data: bytes) -> bytes:
    """The graph with its constant products in eight bits; inputs and outputs as they were."""
    model = onnx.load_model_from_string(data)
    # Shapes of inner values, which the rewriting would contradict.
    del model.graph.value_info[:]
    # There is nothing to fold or fuse beforehand, and nothing to warn of.
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "graph.onnx")
        quantize_dynamic(model, output, weight_type=QuantType.QInt8, per_channel=True)
        return output.read_bytes()


def quantised(predictor: Predictor) -> Predictor:
    """The same predictor with eight-bit networks; one without networks comes back as it is."""
    files = predictor.files()
    if not any(path.endswith(SUFFIX) for path in files):
        return predictor
    smaller = {
        path: quantised_graph(data) if path.endswith(SUFFIX) else data
        for path, data in files.items()
    }
    return type(predictor).from_files(predictor.spec, smaller, predictor.options())
