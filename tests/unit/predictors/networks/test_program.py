"""Graphs that are none of moecast's are refused, whatever would compute them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from predictors.errors import PredictorError
from predictors.networks.network import Network
from predictors.networks.program import MAX_NODES
from tests.fuzz.target import MAX_SECONDS
from zoo.entry import check_graph
from zoo.errors import ZooError

WEIGHT = np.eye(4, 8, dtype=np.float32)
DATA = WEIGHT.tobytes()


def declare(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


HIDDEN, SCORES = declare("hidden", "T", 4), declare("scores", "T", 8)


def make_graph(
    *nodes: NodeProto, inputs=(HIDDEN,), outputs=(SCORES,), change: Callable = id, **tensors: Any
) -> bytes:
    """A network of these operators; `change` alters it at the end."""
    arrays = {"w": WEIGHT, **{name: np.asarray(value) for name, value in tensors.items()}}
    held = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "test", inputs, outputs, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    change(model)
    return model.SerializeToString()


def node(operator: str, *inputs: str, gives: Sequence[str] = ("scores",), **attributes: Any) -> Any:
    return helper.make_node(operator, inputs, gives, **attributes)


PRODUCT = node("Gemm", "hidden", "w", gives=["logits"])
LAST = node("Relu", "logits")


def altered(change: Callable[[onnx.ModelProto], Any] = id, **parts: Any) -> bytes:
    """A network of the two operators, altered, or with other inputs or outputs."""
    return make_graph(PRODUCT, LAST, change=change, **parts)


def ending(operator: str, *inputs: str, **attributes: Any) -> bytes:
    """A network whose last operator is this one."""
    return make_graph(PRODUCT, node(operator, "logits", *inputs, **attributes))


def weighted(**changes: Any) -> bytes:
    """A network of the two operators, with other fields of the weights' tensor."""
    known = {"name": "w", "dims": WEIGHT.shape, "data_type": TensorProto.FLOAT, "raw_data": DATA}
    return altered(lambda m: m.graph.initializer[0].CopyFrom(TensorProto(**known | changes)))


def reshape(*sizes: int) -> bytes:
    return make_graph(PRODUCT, node("Reshape", "logits", "sizes"), sizes=np.array(sizes, np.int64))


def split(*inputs: str, axis: int = 1, **tensors: Any) -> bytes:
    parts = node("Split", "logits", *inputs, gives=["a", "b"], axis=axis)
    return make_graph(PRODUCT, parts, node("Relu", "a"), **tensors)


def repeated(num_products: int, num_used: int, *shape: int) -> bytes:
    """A network of one product with zeros of this shape, again and again."""
    products = (node("Gemm", "hidden", "w", gives=[f"{n}"]) for n in range(num_products))
    used = (node("Relu", f"{n}", gives=[f"relu {n}"]) for n in range(num_used))
    inputs = [declare("hidden", "T", shape[0])]
    return make_graph(*products, *used, inputs=inputs, w=np.zeros(shape, np.float32))


MANY = [node("Relu", "logits", gives=[f"{n}"]) for n in range(MAX_NODES)]
DOUBLES = declare("scores", "T", 8, kind=TensorProto.DOUBLE)
REFUSED: dict[str, tuple[bytes, str]] = {
    "constants only": (make_graph(node("Relu", "w")), "'w', which nothing computes"),
    "a loop": (ending("Loop"), "the operator 'Loop' of 'ONNX'; allowed are Add, Cast, "),
    "a name of our own": (ending("Node"), "the operator 'Node'"),
    "another domain": (ending("Relu", domain="com.evil"), "the operator 'Relu' of 'com.evil'"),
    "functions": (altered(lambda m: m.functions.add(name="Relu")), "functions or sparse tensors"),
    "sparse": (altered(lambda m: m.graph.sparse_initializer.add()), "functions or sparse tensors"),
    "a tensor in an attribute": (
        ending("Relu", value=numpy_helper.from_array(WEIGHT)),
        "Relu of other inputs or attributes (got an unexpected keyword argument 'value')",
    ),
    "operators of another year": (
        altered(lambda model: setattr(model.opset_import[0], "version", 12)),
        "operators of the versions [12]",
    ),
    "many operators": (make_graph(PRODUCT, *MANY, LAST), "1,002 operators, over 1,000"),
    "a product again and again": (repeated(20, 20, 4, 300_000), "numbers, over 1,048,576"),
    "a tall one again and again": (repeated(900, 90, 100_000, 2), "products of 67,200,000 bytes"),
    "wide rows": (make_graph(PRODUCT, inputs=[declare("hidden", "T", 2**40)]), "rows of 1,099,5"),
    "a number of rows": (altered(inputs=[declare("hidden", 2**30, 4)]), "not any number of rows"),
    "no shape": (altered(inputs=[declare("hidden")]), "'hidden', which is not rows of float32"),
    "no inputs": (make_graph(inputs=[], outputs=[]), "no inputs or no outputs"),
    "inputs of one name": (altered(inputs=[HIDDEN] * 2), "as 'hidden'"),
    "outputs of one name": (altered(outputs=[SCORES] * 2), "'scores' declared"),
    "values of one name": (make_graph(PRODUCT, PRODUCT, LAST), "two values"),
    "a constant for an input": (altered(inputs=[HIDDEN, declare("w", "T", 8)]), "a name, as 'w'"),
    "no name": (ending("Relu", gives=[""]), "one without a name"),
    "doubles": (altered(outputs=[DOUBLES]), "'scores', which is not rows of float32 numbers"),
    "another output": (make_graph(PRODUCT, outputs=[declare("logits", "T", 9)]), "declared as"),
    "a cast": (ending("Cast", to=TensorProto.DOUBLE), "Cast of other values"),
    "numbers in part": (weighted(raw_data=DATA[:-4]), "the tensor 'w' in part"),
    "numbers elsewhere": (weighted(data_location=TensorProto.EXTERNAL), "'w' in another file"),
    "a size below zero": (weighted(dims=[-1, 8]), "a negative size"),
    "sizes that overflow": (weighted(dims=[2**32, 2**32]), "'w' in part"),
    "a reshape that overflows": (reshape(-1, 2**32 + 1, 2**32), "Reshape of (8,) to"),
    "a reshape of rows": (reshape(2, 4), "Reshape across rows"),
    "a reshape to nothing": (reshape(), "Reshape across rows"),
    "a reshape to a number": (
        make_graph(PRODUCT, node("Reshape", "logits", "sizes"), sizes=np.int64(-1)),
        "'sizes' where a list of sizes belongs",
    ),
    "a split without sizes": (split(), "Split of other inputs or attributes (missing a required"),
    "a split into nothing": (split("parts", parts=np.zeros(0, np.int64)), "Split of (8,) into []"),
    "a split that wraps": (split("parts", parts=np.array([9, -1])), "Split of (8,) into [9, -1]"),
    "a split of rows": (split("parts", parts=np.array([4, 4]), axis=0), "Split of (8,)"),
    "a third part": (split("parts", parts=np.array([2, 2, 4])), "Split with 2 outputs"),
    "no message": (b"not a graph", "not an ONNX model"),
    "nothing": (b"", "operators of the versions []"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", REFUSED)
def test_network__refuses_what_no_training_writes(case: str) -> None:
    graph, message = REFUSED[case]
    with pytest.raises(PredictorError) as opened:
        Network(graph)
    assert message in str(opened.value)
    assert len(str(opened.value)) < 500
    with pytest.raises(ZooError) as checked:
        check_graph(graph, what="it")
    assert str(checked.value) == f"it: {opened.value}"


EMPTY = {"node": b"\x0a\x00", "init": b"\x2a\x00", "in": b"\x5a\x00"}


@pytest.mark.parametrize("message", EMPTY.values(), ids=EMPTY)
def test_network__measures_a_file_before_it_is_parsed(message, monkeypatch):
    """64 MiB of empty operators, tensors or inputs took 5 GB; these are 8 MiB."""
    content = message * (4 << 20)
    size = b"".join(bytes([len(content) >> 7 * n & 127 | 128]) for n in range(4))
    monkeypatch.setattr("onnx.load_model_from_string", None)
    with pytest.raises(PredictorError, match="over 1,048,576 bytes besides its weights"):
        Network(b"\x3a" + size[:-1] + bytes([size[-1] & 127]) + content)


def test_translation__of_many_operators_is_linear() -> None:
    names = ["logits", *(f"{number}" for number in range(MAX_NODES - 2)), "scores"]
    chain = [node("Relu", a, gives=[b]) for a, b in zip(names, names[1:], strict=False)]
    started = time.process_time()
    network = Network(make_graph(PRODUCT, *chain))
    assert time.process_time() - started < MAX_SECONDS / 4
    assert network.outputs == {"scores": ["T", 8]}


def test_products__of_one_value_are_computed_once() -> None:
    graph = make_graph(
        PRODUCT, node("Relu", "logits", gives=["a"]), node("Sigmoid", "logits", gives=["b"]),
        node("Add", "logits", "logits", gives=["c"]), node("Add", "a", "b", gives=["d"]),
        node("Add", "c", "d"),
    )  # fmt: skip
    x = np.array([[1, -2, 3, 0]], np.float32) @ WEIGHT
    (found,) = Network(graph).run(["scores"], {"hidden": x[:, :4]})
    np.testing.assert_allclose(found, np.maximum(x, 0) + 1 / (1 + np.exp(-x)) + 2 * x, rtol=1e-6)
