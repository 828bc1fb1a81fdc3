"""Checks of an ONNX file before onnxruntime sees it: it must be one self-contained graph."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zoo.errors import ZooError
from zoo.manifest import MAX_ONNX_BYTES, GraphRecord

if TYPE_CHECKING:
    import onnx

DOMAINS = ("", "ai.onnx")
"""The standard operators; any other domain may need a library."""


def check_graph(data: bytes, *, what: str) -> GraphRecord:
    """Returns the graph's inputs and outputs.

    Raises:
        ZooError: it is too large, keeps tensors in other files, needs foreign operators, or has
            inputs without a shape.
    """
    import onnx
    from google.protobuf.message import DecodeError

    if len(data) > MAX_ONNX_BYTES:
        raise ZooError(f"{what} has {len(data):,} bytes; a graph may have {MAX_ONNX_BYTES:,}")
    try:
        model = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ZooError(f"{what} is not an ONNX model ({error})") from error
    nodes = (node for graph in iterate_graphs(model.graph) for node in graph.node)
    foreign = sorted({node.domain for node in nodes} - set(DOMAINS))
    if foreign or model.functions:
        domains = foreign or "functions of the model"
        raise ZooError(f"{what} uses operators of {domains}; allowed are the standard ones")
    for tensor in iterate_tensors(model.graph):
        if tensor.external_data or tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ZooError(f"{what} keeps the tensor {tensor.name!r} in another file: not allowed")
    # Old graphs list their weights as inputs too.
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    return GraphRecord(
        inputs={value.name: read_shape(value, what=what) for value in inputs},
        outputs={value.name: read_shape(value, what=what) for value in model.graph.output},
    )


def read_shape(value: "onnx.ValueInfoProto", *, what: str) -> list[int | str]:
    """Returns the sizes of a tensor's dimensions; name or "?" of a dynamic one."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        raise ZooError(f"{what}: {value.name!r} is not a tensor with a declared shape")
    return [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
        for dim in value.type.tensor_type.shape.dim
    ]


def iterate_graphs(graph: "onnx.GraphProto") -> Iterator["onnx.GraphProto"]:
    """Yields the graph and the subgraphs of its operators."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else []
            for subgraph in (*inner, *attribute.graphs):
                yield from iterate_graphs(subgraph)


def iterate_tensors(graph: "onnx.GraphProto") -> Iterator["onnx.TensorProto"]:
    """Yields the tensors of a graph and its subgraphs: initializers, sparse ones, attributes."""
    for subgraph in iterate_graphs(graph):
        yield from subgraph.initializer
        for sparse in subgraph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in subgraph.node:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)
