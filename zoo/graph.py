"""What an ONNX file may be before onnxruntime sees it: one graph, all of it in this one file."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zoo.errors import ZooError
from zoo.manifest import MAX_ONNX_BYTES

if TYPE_CHECKING:
    import onnx

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
"""Operators that come with onnxruntime; any other domain needs a library from somewhere."""


def check_graph(data: bytes, *, what: str) -> None:
    """ZooError when a graph is too large, keeps tensors in other files, or needs foreign code."""
    import onnx
    from google.protobuf.message import DecodeError

    if len(data) > MAX_ONNX_BYTES:
        raise ZooError(f"{what} has {len(data):,} bytes; a graph may have {MAX_ONNX_BYTES:,}")
    try:
        model = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ZooError(f"{what} is not an ONNX model ({error})") from error
    foreign = sorted({one.domain for one in model.opset_import} - set(DOMAINS))
    if foreign or model.functions:
        raise ZooError(f"{what} uses operators of {foreign or 'its own'}; allowed: {DOMAINS}")
    for tensor in tensors(model.graph):
        if tensor.external_data or tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ZooError(f"{what} keeps the tensor {tensor.name!r} in another file: not allowed")


def tensors(graph: "onnx.GraphProto") -> Iterator["onnx.TensorProto"]:
    """Every tensor of a graph: initialisers, sparse ones, attributes, those of its subgraphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for subgraph in (attribute.g, *attribute.graphs):
                yield from tensors(subgraph)
