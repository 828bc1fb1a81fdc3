"""Products have PyTorch's bits, or are left to PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from runtime.hf import experts
from runtime.hf import linear as products
from runtime.hf.experts import AccumulationDtype, compute_experts
from runtime.hf.linear import OwnLinear, convert_linears, linear, multiply_rows

COLUMNS = [16, 17, 32, 40, 48, 96, 128, 208, 768, 1984, 2048]
"""With and without whole turns of the kernels' registers, rests of each length, two that fill no
vectors."""


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with torch.no_grad():
        yield


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(tensor):
    return tensor.view(torch.int16).tolist()


SINGLE_ROWS = pytest.mark.parametrize("dtype", products.SINGLE_ROWS)


@SINGLE_ROWS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_linear__has_the_bits_of_pytorch(columns, has_bias, dtype):
    def draw_more(*shape, seed=0):
        return draw(*shape, seed=seed).to(dtype) * 1.1

    for rows in (1, 16, 77, 600):  # the last: several threads
        weight = draw_more(rows, columns)
        bias = draw_more(rows, seed=1) if has_bias else None
        x = draw_more(1, 1, columns, seed=2)
        assert bits(linear(x, weight, bias)) == bits(F.linear(x, weight, bias))
        bias = -linear(x, weight, bias).view(rows)  # what is left shows the last bits of the sums
        assert bits(linear(x, weight, bias)) == bits(F.linear(x, weight, bias))


@SINGLE_ROWS
def test_linear__has_the_bits_of_pytorch_for_numbers_that_are_none(dtype):
    weight, x = draw(64, 64).to(dtype), draw(1, 64, seed=1).to(dtype)
    weight[:8, 3], weight[8:16, 4], weight[16:24, 5] = float("nan"), float("inf"), -0.0
    weight[24:32], weight[32:40] = 1e-39, 3e38
    weight[40:48, 6], x[0, 7] = -float("inf"), 1e-40
    assert bits(linear(x, weight)) == bits(F.linear(x, weight))


@SINGLE_ROWS
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_linear__of_unaligned_weights_has_the_bits_of_pytorch(offset, dtype):
    """MKL begins another order of its sums at the next multiple of 16 bytes."""
    weight = (draw(64 * 256 + offset).to(dtype) * 1.1)[offset:].view(64, 256)
    x = draw(1, 256, seed=1).to(dtype) * 1.1
    assert bits(linear(x, weight)) == bits(F.linear(x, weight))


@SINGLE_ROWS
def test_multiply_rows__multiplies_each_matrix_with_its_row(dtype):
    weights = [draw(48, 64, seed=seed).to(dtype) for seed in range(3)]
    rows = draw(3, 64, seed=9).to(dtype)
    own = multiply_rows(rows, weights)
    has_kernel = dtype is torch.bfloat16 and products.multiply_row is not None
    if has_kernel and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert own is not None, "this processor has a kernel with PyTorch's bits"
    expected = [F.linear(row, weight) for row, weight in zip(rows.split(1), weights, strict=True)]
    assert own is None or bits(own) == bits(torch.cat(expected))


def leave_out(**changes):
    return {"x": draw(1, 64), "weight": draw(48, 64, seed=1), **changes}


LEFT = {
    "another dtype": leave_out(x=torch.ones(1, 64).half(), weight=torch.ones(48, 64).half()),
    "few rows": leave_out(weight=draw(8, 64)),
    "transposed": leave_out(weight=draw(64, 48).t()),
    "several rows": leave_out(x=draw(2, 64)),
    "a bias that is added afterwards": leave_out(
        x=draw(1, 64, 4)[:, :, -1:].transpose(1, 2), bias=draw(48, seed=2)
    ),
    "a bias of one number": leave_out(bias=draw(1).expand(48)),
}


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_linear__leaves_other_products_to_pytorch(case, monkeypatch):
    expected = F.linear(**{"input" if name == "x" else name: case[name] for name in case})
    monkeypatch.setattr(products, "_multiply", lambda *_: pytest.fail("they are PyTorch's"))
    assert torch.equal(linear(**case), expected)


WRONG = {
    "too few columns": leave_out(x=draw(1, 32)),
    "a bias of another dtype": leave_out(bias=torch.ones(48)),
    "a bias of another length": leave_out(bias=draw(47)),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_linear__what_pytorch_refuses_is_not_read(case):
    with pytest.raises(RuntimeError):
        linear(**case)


def test_linear__computes_where_its_row_is():
    weight, x = draw(48, 64), draw(1, 64, seed=1)
    expected = F.linear(x, weight)
    with torch.device("meta"):
        assert torch.equal(linear(x, weight), expected)


ROUNDED = [(1, 1), (16, 16), (17, 18), (32, 32), (33, 36), (70, 72), (131, 144), (513, 576)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(77, 40), (40, 256), (600, 1984)])
def test_linear__of_several_rows_has_the_bits_of_pytorch(shape, dtype, has_bias):
    torch.backends.mkldnn.enabled = True
    weight, bias = draw(*shape).to(dtype), draw(shape[0], seed=1).to(dtype) if has_bias else None
    for rows, size in ROUNDED:
        x = draw(1, rows, shape[1], seed=rows).to(dtype)
        assert products.round_up(rows) == size
        assert bits(linear(x, weight, bias)) == bits(F.linear(x, weight, bias))


@pytest.mark.parametrize("shape", [(60, 1984), (768, 2048)])
def test_linear__of_a_transposed_input_has_the_bits_of_pytorch(shape, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    weight, x = draw(*shape), draw(shape[1], 33, seed=1).t()
    weight[:, 5], x[:, 5], x[:, 700] = weight[:, 700], 2.0**30, -(2.0**30)
    assert bits(linear(x, weight)) == bits(F.linear(x, weight))


@pytest.mark.parametrize("ignores", [True, False])
def test_linear__rounds_rows_where_onednn_compiles_and_bits_stay(ignores, monkeypatch):
    weight, sizes = draw(48, 64), []

    def multiply(x, *args):
        sizes.append(len(x))
        return torch.zeros(len(x), len(weight))

    def sizes_of(rows):
        sizes.clear()
        assert linear(draw(rows, 64), weight).shape == (rows, 48)
        return sizes

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(products, "_ignores_added_rows", lambda *_: ignores)
    monkeypatch.setattr(F, "linear", multiply)
    assert sizes_of(70) == [70]  # without oneDNN
    torch.backends.mkldnn.enabled = True
    assert sizes_of(70) == [72 if ignores else 70]
    assert sizes_of(16) == [16]
    with monkeypatch.context() as patch:
        patch.setattr(products, "MOST_WEIGHTS", weight.numel() - 1)
        assert sizes_of(70) == [70]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert sizes_of(70) == [70]


def test_ignores_added_rows__sees_sums_in_another_order(monkeypatch):
    def multiply_backwards(size, x, weight, bias):
        return F.linear(x.flip(1), weight.flip(1), bias)

    torch.backends.mkldnn.enabled = True
    monkeypatch.setattr(products, "_multiply_with", multiply_backwards)
    uncached, threads = products._ignores_added_rows.__wrapped__, torch.get_num_threads()
    assert not uncached(96, 768, torch.bfloat16, False, threads)


def test_convert_linears__changes_large_layers_and_no_bit():
    model = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512, bias=False), nn.Linear(512, 16))
    model.bfloat16()
    x = draw(1, 1, 512)
    expected = model(x)
    convert_linears(model)
    assert [type(layer) for layer in model] == [OwnLinear, OwnLinear, nn.Linear]
    assert bits(model(x)) == bits(expected)


def test_linear__is_left_to_pytorch_with_onednn_and_with_gradients(monkeypatch):
    monkeypatch.setattr(products, "_multiply", lambda *_: pytest.fail("it is PyTorch's"))
    weight, x = nn.Parameter(draw(48, 64)), draw(1, 64, seed=1)
    with torch.enable_grad():
        linear(x, weight).float().sum().backward()
    assert weight.grad is not None
    torch.backends.mkldnn.enabled = True
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def sum_by_the_matrix_product(x, weights, bias=None):
    products = zip(x.double().expand(len(weights), -1), weights, strict=True)
    return torch.stack([weight.double() @ row for row, weight in products]).to(x.dtype)


def sum_backwards(x, weights, bias=None):
    backwards = zip(x.flip(1).expand(len(weights), -1), weights, strict=True)
    return torch.stack([F.linear(row[None], weight.flip(1))[0] for row, weight in backwards])


def make_zeros(x, *_):
    return torch.zeros(2, 256, dtype=x.dtype)


@SINGLE_ROWS
@pytest.mark.parametrize("columns", [32, 96, 1984, 2048])
@pytest.mark.parametrize("other", [make_zeros, sum_by_the_matrix_product, sum_backwards])
def test_linear__is_left_to_pytorch_where_its_bits_are_others(other, columns, dtype, monkeypatch):
    """Those of another order of the sums, of which few numbers in bfloat16 show a difference."""
    monkeypatch.setattr(products, "_multiply", other)
    monkeypatch.setattr(products, "_has_equal_bits", products._has_equal_bits.__wrapped__)
    assert multiply_rows(draw(1, columns).to(dtype), [draw(64, columns).to(dtype)]) is None


@pytest.mark.parametrize(("width", "divided"), [(64, 32_768), (64, 128), (96, 32_768)])
def test_compute_experts__together_have_the_bits_of_each_alone(width, divided, monkeypatch):
    monkeypatch.setattr(experts, "DIVIDED", divided)
    config = Qwen2MoeConfig(hidden_size=64, moe_intermediate_size=width, num_experts=6)
    module, ready = Qwen2MoeExperts(config), {}
    for e in (0, 2, 5):
        gate_up, down = draw(2 * width, 64, seed=e), draw(64, width, seed=10 + e)
        ready[e] = {"gate_up_proj": gate_up, "down_proj": down}
    chosen, weights = torch.tensor([[5, 0, 2]]), torch.tensor([[0.5, 0.25, 0.125]]).bfloat16()

    def compute():
        batches = iter([{2: ready[2]}, {5: ready[5], 0: ready[0]}])  # as they become ready
        how = AccumulationDtype.HIDDEN
        return compute_experts(module, lambda _: batches, how, draw(1, 64, seed=3), chosen, weights)

    together = compute()
    monkeypatch.setattr(experts, "multiply_rows", lambda *_: None)
    monkeypatch.setattr(experts, "linear", F.linear)
    assert bits(together) == bits(compute())
