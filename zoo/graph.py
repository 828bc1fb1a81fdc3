"""What an ONNX file may be before onnxruntime sees it: one graph, all of it in this one file."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zoo.errors import ZooError
from zoo.manifest import MAX_ONNX_BYTES, GraphRecord

if TYPE_CHECKING:
    import onnx

DOMAINS = ("", "ai.onnx")
"""The standard's own operators; any other domain may need a library from somewhere."""


def check_graph(data: bytes, *, what: str) -> GraphRecord:
    """What the graph takes and gives.

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
    foreign = sorted({node.domain for node in nodes(model.graph)} - set(DOMAINS))
    if foreign or model.functions:
        named = foreign or "its own"
        raise ZooError(f"{what} uses operators of {named}; allowed are the standard ones")
    for tensor in tensors(model.graph):
        if tensor.external_data or tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ZooError(f"{what} keeps the tensor {tensor.name!r} in another file: not allowed")
    # Old graphs list their weights among the inputs.
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [one for one in model.graph.input if one.name not in weights]
    return GraphRecord(
        inputs={one.name: shape(one, what=what) for one in inputs},
        outputs={one.name: shape(one, what=what) for one in model.graph.output},
    )


def check_declared(found: GraphRecord, declared: GraphRecord | None, *, what: str) -> None:
    """ZooError when a graph takes or gives something else than its manifest says."""
    if declared is not None and found != declared:
        raise ZooError(
            f"{what} takes {found.inputs} and gives {found.outputs}; its manifest declares "
            f"{declared.inputs} and {declared.outputs}"
        )


def shape(value: "onnx.ValueInfoProto", *, what: str) -> list[int | str]:
    """Sizes of a tensor's dimensions; the name, or "?", of one that is free."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        raise ZooError(f"{what}: {value.name!r} is not a tensor with a declared shape")
    return [
        one.dim_value if one.HasField("dim_value") else one.dim_param or "?"
        for one in value.type.tensor_type.shape.dim
    ]


def graphs(graph: "onnx.GraphProto") -> Iterator["onnx.GraphProto"]:
    """The graph and all graphs inside its operators."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else []
            for subgraph in (*inner, *attribute.graphs):
                yield from graphs(subgraph)


def nodes(graph: "onnx.GraphProto") -> Iterator["onnx.NodeProto"]:
    """Every operator of a graph and of its subgraphs."""
    for one in graphs(graph):
        yield from one.node


def tensors(graph: "onnx.GraphProto") -> Iterator["onnx.TensorProto"]:
    """Every tensor of a graph: initialisers, sparse ones, attributes, those of its subgraphs."""
    for one in graphs(graph):
        yield from one.initializer
        for sparse in one.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in one.node:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)
