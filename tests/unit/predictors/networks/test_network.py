from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from predictors.errors import PredictorError
from predictors.networks import network as network_module
from predictors.networks.network import Network
from train.export import network_graph, quantise_graph, residual_graph, reuse_graph

if network_module.kernels is None:
    pytest.skip("the kernels are not compiled", allow_module_level=True)
kernels = network_module.kernels


@pytest.fixture(params=kernels.INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels.use_instructions(request.param)
    yield request.param
    kernels.use_instructions(kernels.INSTRUCTIONS[0])


RANDOM = np.random.default_rng(7)
NUM_INPUTS, WIDTH, NUM_EXPERTS, NUM_TARGETS = 37, 50, 13, 3
RANK, TOKEN_SIZE, LOW_RANK, NUM_MEANS = 6, 5, 7, 29
"""Multiples of nothing that the kernels round up to."""


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def make_normaliser(size: int) -> tuple[np.ndarray, np.ndarray]:
    return draw(size), np.abs(draw(size)) + 0.1


def make_residual_graph(*, is_first: bool) -> bytes:
    outputs = NUM_TARGETS * NUM_EXPERTS
    memory = RANK if is_first else RANK + TOKEN_SIZE
    weights = {
        "state": draw(NUM_INPUTS, RANK), "state_bias": draw(RANK), "in": draw(NUM_INPUTS, WIDTH),
        "in_bias": draw(WIDTH), "router": draw(NUM_INPUTS, outputs), "out_bias": draw(outputs),
        "memory": draw(memory, WIDTH), "out": draw(WIDTH, outputs) / 8,
        "scale": np.abs(draw(NUM_TARGETS, 1)), "shift": draw(NUM_TARGETS, 1),
    }  # fmt: skip
    if is_first:
        weights |= {"token": draw(NUM_INPUTS, TOKEN_SIZE), "token_bias": draw(TOKEN_SIZE)}
    else:
        weights |= {"low": draw(NUM_INPUTS, LOW_RANK), "low_bias": draw(LOW_RANK)}
        weights["by_expert"] = draw(NUM_EXPERTS, LOW_RANK, outputs) / 8
    normaliser = make_normaliser(NUM_INPUTS)
    return residual_graph(weights, num_targets=NUM_TARGETS, name="it", normaliser=normaliser)


def make_network_graph() -> bytes:
    return network_graph(
        draw(NUM_INPUTS, WIDTH), draw(WIDTH), draw(WIDTH, NUM_EXPERTS), draw(NUM_EXPERTS),
        name="it", normaliser=make_normaliser(NUM_INPUTS),
    )  # fmt: skip


def make_reuse_graph() -> bytes:
    weights = {
        "pool": draw(NUM_INPUTS, RANK), "pool_bias": draw(RANK),
        "from_pool": draw(RANK, WIDTH + NUM_EXPERTS),
        "from_means": draw(NUM_MEANS, WIDTH + NUM_EXPERTS) / 8, "bias": draw(WIDTH + NUM_EXPERTS),
        "means_centre": draw(NUM_MEANS), "means_factor": np.abs(draw(NUM_MEANS)),
        "out": draw(WIDTH, NUM_EXPERTS) / 8,
    }  # fmt: skip
    return reuse_graph(weights, name="it", normaliser=make_normaliser(NUM_INPUTS))


GRAPHS: dict[str, Callable[[], bytes]] = {
    "network": make_network_graph,
    "reuse": make_reuse_graph,
    "residual": lambda: make_residual_graph(is_first=False),
    "residual of the first source": lambda: make_residual_graph(is_first=True),
}


def draw_inputs(network: Network, num_rows: int) -> dict[str, np.ndarray]:
    return {name: draw(num_rows, *shape[1:]) for name, shape in network.inputs.items()}


@pytest.fixture(params=["kernels", "onnxruntime"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "onnxruntime":
        monkeypatch.setattr(network_module, "kernels", None)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("num_rows", [1, 3, 4, 17])
@pytest.mark.parametrize("is_quantised", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_networks__compute_what_onnx_specifies(kind: str, is_quantised: bool, num_rows: int):
    """float32 against onnxruntime; kernels' int8 against the reference implementation of ONNX.

    On an x86 CPU without VNNI, onnxruntime adds pairs of products of eight bits with VPMADDUBSW, in
    sixteen bits that saturate (its documentation of quantisation says so at U8S8).
    """
    graph = GRAPHS[kind]()
    if is_quantised:
        graph = quantise_graph(graph)
    network, session = Network(graph), onnxruntime.InferenceSession(graph)
    assert network.inputs == {value.name: value.shape for value in session.get_inputs()}
    assert network.outputs == {value.name: value.shape for value in session.get_outputs()}
    is_specified = is_quantised and network_module.kernels is not None
    run = ReferenceEvaluator(graph).run if is_specified else session.run
    inputs = draw_inputs(network, num_rows)
    for wanted in (list(network.outputs), [list(network.outputs)[-1]]):
        for ours, reference in zip(network.run(wanted, inputs), run(wanted, inputs), strict=True):
            assert ours.shape == reference.shape
            np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=2e-5)


def quantise_rows(x_TK: np.ndarray) -> tuple[np.ndarray, np.float32, int]:
    """ONNX's DynamicQuantizeLinear, from its specification."""
    least, most = min(0.0, float(x_TK.min())), max(0.0, float(x_TK.max()))
    scale = np.float32((np.float32(most) - np.float32(least)) / np.float32(255)) or np.float32(1)
    zero = int(np.clip(np.rint(np.float32(-least) / scale), 0, 255))
    return np.clip(np.rint(x_TK / scale) + zero, 0, 255).astype(np.int64), scale, zero


@pytest.mark.usefixtures("instructions")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(1, 6), num_inputs=st.integers(1, 200), num_outputs=st.integers(1, 40),
    has_vector=st.booleans(), size=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_integer_product__is_exact_in_the_integers(
    num_rows: int, num_inputs: int, num_outputs: int, has_vector: bool, size: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x_TK = (size * random.standard_normal((num_rows, num_inputs))).astype(np.float32)
    weight_NK = random.integers(-128, 128, (num_outputs, num_inputs)).astype(np.int8)
    scale_N = random.random(num_outputs).astype(np.float32) + np.float32(0.1)
    vector_N = random.standard_normal(num_outputs).astype(np.float32) if has_vector else None
    operation = (6, 1, 0, -1, 0, vector_N, weight_NK, scale_N)
    program = kernels.Program(((-1, 0, num_inputs), (-1, 0, num_outputs)), (operation,), (0,), (1,))
    ours_TN = np.empty((num_rows, num_outputs), np.float32)
    program.run(num_rows, (x_TK,), (ours_TN,))

    q_TK, scale, zero = quantise_rows(x_TK)
    whole_TN = (q_TK - zero) @ weight_NK.T.astype(np.int64)
    expected_TN = whole_TN.astype(np.float32) * (scale * scale_N) + (vector_N if has_vector else 0)
    np.testing.assert_allclose(ours_TN, expected_TN, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 60.0, 1e4, 3e38])
def test_sigmoid__stays_within_zero_and_one(size: float) -> None:
    x_1N = np.array([[-size, size, -size / 3, size / 3, 0.0]], np.float32)
    sigmoid = (5, 1, 0, -1, 0, None, None, None)
    ours_1N = np.empty_like(x_1N)
    kernels.Program(((-1, 0, 5), (-1, 0, 5)), (sigmoid,), (0,), (1,)).run(1, (x_1N,), (ours_1N,))
    with np.errstate(over="ignore"):
        expected_1N = 1 / (1 + np.exp(-x_1N.astype(np.float64)))
    np.testing.assert_allclose(ours_1N, expected_1N, atol=1e-6)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_integer_product__survives_what_is_not_finite(value: float) -> None:
    network = Network(quantise_graph(make_network_graph()))
    hidden = draw(3, NUM_INPUTS)
    hidden[1, 2] = value
    assert network.run(["scores"], {"hidden": hidden})[0].shape == (3, NUM_EXPERTS)


@pytest.mark.usefixtures("engine")
def test_inputs__may_come_in_parts() -> None:
    network = Network(make_network_graph())
    hidden = draw(5, NUM_INPUTS)
    parts = tuple(map(np.ascontiguousarray, np.split(hidden, [10, 11], axis=1)))
    (whole,), (joined,) = (network.run(["scores"], {"hidden": value}) for value in (hidden, parts))
    assert np.array_equal(whole, joined)


def test_networks__run_in_several_threads_at_once() -> None:
    network = Network(quantise_graph(make_residual_graph(is_first=False)))
    inputs = [draw_inputs(network, num_rows) for num_rows in (1, 9, 1, 64) * 8]
    expected = [network.run(["scores"], one)[0] for one in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            results = pool.map(lambda one: network.run(["scores"], one)[0], inputs)
            assert all(map(np.array_equal, results, expected))


OTHER_ARRAYS = {
    "wide": draw(2, NUM_INPUTS + 1),
    "float64": draw(2, NUM_INPUTS).astype(np.float64),
    "columns first": np.asfortranarray(draw(2, NUM_INPUTS)),
    "wide parts": (draw(2, NUM_INPUTS - 1), draw(2, 2)),
    "a part missing": (draw(2, NUM_INPUTS - 1),),
    "rows missing": (draw(2, NUM_INPUTS - 1), draw(1, 1)),
}


@pytest.mark.parametrize("hidden", OTHER_ARRAYS.values(), ids=OTHER_ARRAYS)
def test_run__refuses_other_arrays(hidden: np.ndarray | tuple[np.ndarray, ...]) -> None:
    network = Network(make_network_graph())
    with pytest.raises((ValueError, BufferError)):
        network.run(["scores"], {"hidden": hidden})


MISFITS = [
    (((-1, 0, 4), (-1, 0, 3)), (3, 1, 0, -1, 0, None, None, None)),
    (((-1, 0, 4), (0, 3, 2)), (3, 1, 0, -1, 0, None, None, None)),
    (((-1, 0, 4), (5, 0, 4)), (3, 1, 0, -1, 0, None, None, None)),
    (((-1, 0, 4), (-1, 0, 4)), (3, 2, 0, -1, 0, None, None, None)),
    (((-1, 0, 4), (-1, 0, 4)), (3, 1, -1, -1, 0, None, None, None)),
    (((-1, 0, 4), (-1, 0, 4)), (2, 1, 0, -1, 0, None, None, None)),
    (((-1, 0, 4), (-1, 0, 4)), (0, 1, 0, -1, 0, None, None, None)),
    (((-1, 0, 4), (-1, 0, 4)), (0, 1, 0, -1, 0, draw(3), None, None)),
    (((-1, 0, 4), (-1, 0, 4)), (4, 1, 0, -1, 3, None, None, None)),
    (((-1, 0, 4), (-1, 0, 4)), (7, 1, 0, -1, 0, None, None, None)),
    (((-1, 0, 4), (-1, 0, 2)), (6, 1, 0, -1, 0, None, draw(2, 3), None)),
    (((-1, 0, 4), (-1, 0, 2)), (6, 1, 0, -1, 0, None, draw(2, 4), draw(2))),
]


@pytest.mark.parametrize(("buffers", "operation"), MISFITS)
def test_program__refuses_operations_that_do_not_fit(buffers, operation):
    with pytest.raises(ValueError, match="does not fit|invalid columns|no such buffer|expected"):
        kernels.Program(buffers, (operation,), (0,), (1,))


def test_network__refuses_weights_that_are_not_finite() -> None:
    weights = draw(NUM_INPUTS, WIDTH), draw(WIDTH), draw(WIDTH, NUM_EXPERTS)
    graph = network_graph(*weights, np.full(NUM_EXPERTS, np.nan, np.float32), name="it")
    with pytest.raises(PredictorError, match="infinities or NaN"):
        Network(graph)


def test_instructions__that_are_unknown_are_refused() -> None:
    assert kernels.INSTRUCTIONS[-1] == "portable"
    with pytest.raises(ValueError, match="does not have the instructions 'sse9'"):
        kernels.use_instructions("sse9")


def test_decay__rounds_as_numpy() -> None:
    sums, decays, added = draw(3, NUM_INPUTS)
    expected = sums * decays + added
    kernels.decay(sums, decays, added)
    assert np.array_equal(sums, expected)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_are_finite__looks_at_every_number_wherever_it_lies(fault: float) -> None:
    whole = draw(2, 3, 5)
    views = whole, whole[0], whole[:, 1], whole[1, :, 3], np.broadcast_to(whole[1, 0], (4, 5))
    assert all(map(kernels.are_finite, views))
    for place in np.ndindex(*whole.shape):
        before, whole[place] = whole[place], fault
        expected = [bool(np.isfinite(view).all()) for view in views]
        assert [*map(kernels.are_finite, views)] == expected
        whole[place] = before


def test_widen__reads_bfloat16() -> None:
    given, found = torch.randn(9).bfloat16(), np.empty((3, 3), np.float32)
    kernels.widen(given.data_ptr(), found)
    assert np.array_equal(found.ravel(), given.float().numpy())
