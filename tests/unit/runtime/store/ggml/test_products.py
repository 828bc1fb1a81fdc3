"""Products of rows as GGUF files have them, by ggml's kernels (`products.c`)."""

import sys

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType, quants
from torch import nn

from runtime.hf import quantised_experts
from runtime.hf.quantised_experts import compute_quantised
from runtime.store.ggml import library
from runtime.store.ggml.matrix import QuantisedExpert, RowMatrix, RowsPart
from tests.builders.processes import run_python

reason = f"NO GGML LIBRARY: {library.explain_missing()}"
pytestmark = pytest.mark.skipif(library.find_products() is None, reason=reason)
FROM_BYTES = ("IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XXS", "IQ2_XS")
"""Types that ggml writes with importances of weights only, or with tables that it makes first."""
DTYPES = [torch.float32, torch.bfloat16]
EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 3, 256, 96
ROW_LOSS = 0.02
"""Of eight-bit activations: their rounding, 1 / 254 of a block's largest, in every product."""


def make_rows(kind, num_rows, num_columns, seed=0):
    """Bytes of random rows, and the weights that gguf says they are."""
    generator = torch.Generator().manual_seed(seed)
    if kind in FROM_BYTES:
        size = library.TYPES[kind].row_bytes(num_columns)
        stored = torch.randint(0, 256, (num_rows, size), generator=generator, dtype=torch.uint8)
        blocks = stored.view(-1, library.TYPES[kind].block_bytes)
        if kind == "IQ1_M":  # whose scale is in four halves of bytes
            blocks[:, 49:56:2] &= 15
            blocks[:, 55] |= 0x20
        else:
            blocks[:, :2] = torch.full((len(blocks), 1), 0.01).half().view(torch.uint8)
        stored = stored.view(-1)
    else:
        stored = library.encode_rows(kind, torch.randn(num_rows, num_columns, generator=generator))
    if kind in library.PLAIN:
        return stored, stored.view(library.PLAIN[kind]).float().view(num_rows, num_columns)
    if kind == "Q1_0":  # which gguf does not decode: a scale and a sign each
        blocks = stored.view(-1, library.TYPES[kind].block_bytes)
        signs = (blocks[:, 2:, None] >> torch.arange(8) & 1).view(len(blocks), -1).float()
        expected = (2 * signs - 1) * blocks[:, :2].contiguous().view(torch.float16).float()
        return stored, expected.view(num_rows, num_columns)
    decoded = quants.dequantize(stored.numpy(), GGMLQuantizationType[kind])
    return stored, torch.from_numpy(decoded).float().view(num_rows, num_columns)


def error_of(found, expected):
    return (found - expected).norm() / expected.norm()


@pytest.mark.parametrize("kind", list(filter(library.multiplies, library.TYPES)))
def test_rows__are_multiplied_and_decoded_as_gguf_decodes_them(kind):
    torch.manual_seed(0)
    stored, expected = make_rows(kind, 70, 512)
    assert torch.equal(library.decode_rows(kind, stored).float(), expected.view(-1))
    x = torch.randn(5, 512)
    product = RowMatrix([RowsPart(kind, 0, 70)], 512).linear(stored, x)
    assert error_of(product, x @ expected.T) < ROW_LOSS


@pytest.mark.parametrize("num_columns", [32, 224, 288, 768])
def test_rows__of_any_number_of_blocks_are_multiplied_whole(num_columns):
    """Four rows and eight blocks are computed together in Q4_0, with activations in Q8_0."""
    stored, expected = make_rows("Q4_0", 7, num_columns)
    x = torch.randn(2, num_columns, generator=torch.Generator().manual_seed(1))
    product = RowMatrix([RowsPart("Q4_0", 0, 7)], num_columns).linear(stored, x)
    rounded = library.decode_rows("Q8_0", library.encode_rows("Q8_0", x)).view(2, -1)
    assert error_of(product, rounded.double() @ expected.double().T) < 1e-6


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "Q5_0"])
@pytest.mark.parametrize("num_columns", [768, 288])
def test_rows__have_the_same_bits_whatever_number_of_tokens_shares_what_is_unpacked(
    kind, num_columns
):
    if num_columns % library.TYPES[kind].block:
        num_columns *= 8
    stored, _ = make_rows(kind, 75, num_columns)
    matrix = RowMatrix([RowsPart(kind, 0, 75)], num_columns)
    x = torch.randn(12, num_columns, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([matrix.linear(stored, row[None]) for row in x])
    for count in range(2, 13):
        assert torch.equal(matrix.linear(stored, x[-count:]), alone[-count:]), count


@pytest.mark.parametrize(("kind", "first_scale"), [("Q4_0", 0), ("Q4_K", 0), ("Q6_K", 208)])
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_rows__of_the_largest_numbers_and_scales_do_not_overflow(kind, first_scale, byte):
    traits = library.TYPES[kind]
    blocks = torch.full((5 * 768 // traits.block, traits.block_bytes), byte, dtype=torch.uint8)
    scales = blocks[:, first_scale : first_scale + (4 if kind == "Q4_K" else 2)]
    scales[:] = torch.full((1, scales.shape[1] // 2), 0.01).half().view(torch.uint8)
    decoded = quants.dequantize(blocks.view(5, -1).numpy(), GGMLQuantizationType[kind])
    for x in (torch.ones(2, 768), -torch.ones(2, 768)):
        product = RowMatrix([RowsPart(kind, 0, 5)], 768).linear(blocks, x)
        torch.testing.assert_close(product, x @ torch.from_numpy(decoded).T, rtol=1e-4, atol=1e-2)


def test_rows__of_one_matrix_may_have_several_types():
    (first, a), (second, b) = make_rows("Q4_K", 33, 256), make_rows("Q6_K", 40, 256, seed=1)
    third, c = make_rows("Q8_0", 7, 256, seed=2)
    last = RowsPart("Q8_0", len(first) + len(second), 7)
    parts = [RowsPart("Q4_K", 0, 33), RowsPart("Q6_K", len(first), 40), last]
    x = torch.randn(2, 256)
    together = RowMatrix(parts, 256).linear(torch.cat([first, second, third]), x)
    assert error_of(together, x @ torch.cat([a, b, c]).T) < ROW_LOSS


def make_module(*, gate=F.silu, bias=False):
    """What `compute_quantised` asks of an experts module."""

    class Experts(nn.Module):
        num_experts, has_gate, has_bias, has_post_expert_norm = EXPERTS, True, bias, False
        is_transposed = False

        def _apply_gate(self, x):
            first, second = x.chunk(2, dim=-1)
            return gate(first) * second

    return Experts()


def make_experts(kind, down_kind, *, bias=False):
    """Experts in slots, and their weights."""
    experts, weights = [], []
    for e in range(EXPERTS):
        up, up_weights = make_rows(kind, 2 * WIDTH, HIDDEN, seed=e)
        down, down_weights = make_rows(down_kind, HIDDEN, WIDTH, seed=100 + e)
        slot = torch.cat([up, down])
        matrices = {
            "gate_up_proj": RowMatrix([RowsPart(kind, 0, 2 * WIDTH)], HIDDEN),
            "down_proj": RowMatrix([RowsPart(down_kind, len(up), HIDDEN)], WIDTH),
        }
        sizes = {"gate_up_proj_bias": 2 * WIDTH, "down_proj_bias": HIDDEN}
        tensors = {name: torch.randn(size) for name, size in sizes.items() if bias}
        experts.append(QuantisedExpert(slot, slot.data_ptr(), matrices, tensors))
        weights.append((up_weights, down_weights, tensors))
    return experts, weights


def choose(num_tokens):
    generator = torch.Generator().manual_seed(7)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    return torch.randn(num_tokens, HIDDEN, generator=generator), ids, weights


def compute(module, experts, hidden, ids, weights, *, batches=(range(EXPERTS),)):
    wanted = set(ids.flatten().tolist())
    ready = ({e: experts[e] for e in batch if e in wanted} for batch in batches)
    return compute_quantised(module, [some for some in ready if some], hidden, ids, weights)


@pytest.mark.parametrize("gate", [F.silu, F.gelu], ids=["silu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_experts__compute_what_their_decoded_weights_compute(gate, bias):
    module = make_module(gate=gate, bias=bias)
    experts, decoded = make_experts("Q4_K", "Q8_0", bias=bias)
    hidden, ids, weights = choose(9)
    ids[3, 1] = EXPERTS  # which means: skip
    expected = torch.zeros(9, HIDDEN)
    for token, expert, weight in zip(range(9), ids.tolist(), weights, strict=True):
        for e, w in zip(expert, weight, strict=True):
            if e == EXPERTS:
                continue
            up, down, tensors = decoded[e]
            inner = F.linear(hidden[token], up, tensors.get("gate_up_proj_bias"))
            inner = gate(inner[:WIDTH]) * inner[WIDTH:]
            expected[token] += w * F.linear(inner, down, tensors.get("down_proj_bias"))
    found = compute(module, experts, hidden, ids, weights)
    assert error_of(found, expected) < 3 * ROW_LOSS  # three products


WHOLE_OR_NOT = [
    *(("Q4_0", gate, dtype) for gate in (F.silu, F.gelu) for dtype in DTYPES),
    *((kind, F.silu, torch.float32) for kind in ("Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")),
]
"""With SiLU, `products.c` computes the whole expert."""


@pytest.mark.parametrize(("kind", "gate", "dtype"), WHOLE_OR_NOT)
def test_experts__a_token_s_bits_are_its_own(kind, gate, dtype):
    """Neither threads, nor other tokens, nor the order of arrival change them."""
    module = make_module(gate=gate)
    experts, _ = make_experts(kind, kind if library.TYPES[kind].block == 32 else "Q5_0")
    hidden, ids, weights = choose(17)
    hidden = hidden.to(dtype)
    torch.set_num_threads(1)
    expected = compute(module, experts, hidden, ids, weights)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(compute(module, experts, hidden, ids, weights), expected)
        found = compute(module, experts, hidden, ids, weights, batches=[[4, 2], [0], [5, 3, 1]])
        assert torch.equal(found, expected)
        for first in range(17):
            part = slice(first, first + 1 + first % 3)
            alone = compute(module, experts, hidden[part], ids[part], weights[part])
            assert torch.equal(alone, expected[part])


@pytest.mark.parametrize("gate", [F.silu, F.gelu], ids=["silu", "gelu"])
def test_experts__of_long_prompts_are_computed_in_parts(monkeypatch, gate):
    """With the same bits, also where a part chose no expert or not all of them."""
    module = make_module(gate=gate)
    experts, _ = make_experts("Q8_0", "Q8_0")
    hidden, ids, weights = choose(11)
    ids[4:8] = EXPERTS  # which means: skip
    ids[8:] = ids[8]
    expected = compute(module, experts, hidden, ids, weights)
    assert not expected[4:8].any()
    counts, together = [], quantised_experts._compute_together

    def count(module, ready, hidden, *choices):
        counts.append(len(hidden))
        return together(module, ready, hidden, *choices)

    monkeypatch.setattr(quantised_experts, "TOKENS_AT_ONCE", 4)
    monkeypatch.setattr(quantised_experts, "_compute_together", count)
    assert torch.equal(compute(module, experts, hidden, ids, weights), expected)
    assert counts == [4, 4, 3]
    late = compute(module, experts, hidden, ids, weights, batches=[[5, 0], [1, 2, 3, 4]])
    assert torch.equal(late, expected)
    skipped = torch.full_like(ids, EXPERTS)
    assert not compute(module, experts, hidden, skipped, weights).any()
    assert counts[3] == 11


def test_products__refuse_what_they_cannot_compute():
    products, stored = library.find_products(), torch.zeros(1024, dtype=torch.uint8)
    address = stored.data_ptr()

    def multiply(parts, columns, pairs):
        products.multiply(parts, columns, [address], pairs, 1, 1, address, address, 1)

    number = library.TYPES["Q4_0"].number
    for parts in ((), ((99, 0, 1),), ((-1, 0, 1),), ((number, -1, 1),), ((number, 0, 0),)):
        with pytest.raises(ValueError, match="parts that are not multiplied"):
            multiply(parts, 32, [[0]])
    with pytest.raises(ValueError, match="parts that are not multiplied"):
        multiply(((number, 0, 1),), 31, [[0]])
    for pairs in ([[1]], [[-1]], [[0], [0]]):
        with pytest.raises(ValueError, match="no experts and pairs"):
            multiply(((number, 0, 1),), 32, pairs)
    with pytest.raises(ValueError, match="no rows of type"):
        products.decode(99, 1, 32, address, address, 1)


def test_products__work_in_a_forked_process():
    """Threads do not survive a fork; a child starts its own."""
    code = (
        "import os, torch\n"
        "from runtime.store.ggml.library import encode_rows\n"
        "from runtime.store.ggml.matrix import RowMatrix, RowsPart\n"
        "torch.set_num_threads(2)\n"
        "stored, x = encode_rows('Q8_0', torch.ones(512, 512)), torch.ones(1, 512)\n"
        "matrix = RowMatrix([RowsPart('Q8_0', 0, 512)], 512)\n"
        "assert (matrix.linear(stored, x) - 512).abs().max() < 1\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(int((matrix.linear(stored, x) - 512).abs().max() >= 1))\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    run_python("-c", code, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_products__use_threads_again_after_none_could_be_started():
    code = (
        "import os, resource, torch\n"
        "from runtime.store.ggml.library import decode_rows, encode_rows\n"
        "def count_threads():\n"
        "    return len(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(4)\n"
        "stored, before = encode_rows('Q8_0', torch.ones(1, 512)).repeat(256), count_threads()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "limits = resource.getrlimit(resource.RLIMIT_AS)\n"
        # Room for the result, and for no thread's stack.
        "resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 19), limits[1]))\n"
        "decode_rows('Q8_0', stored)\n"
        "assert count_threads() == before\n"
        "resource.setrlimit(resource.RLIMIT_AS, limits)\n"
        "decode_rows('Q8_0', stored)\n"
        "assert count_threads() == before + 3\n"
    )
    run_python("-c", code, timeout=60)
