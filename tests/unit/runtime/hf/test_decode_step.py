"""Steps of one token on a CPU: kernels, threads and attention, the decisions and their bits."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2MoeForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import runtime
from runtime.config import DecodeKernels
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf import decode_step
from runtime.hf.loading import load_plain
from runtime.hf.row_block import SequenceStates
from tests.builders import lockstep

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0, "do_sample": False}


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)


@pytest.fixture
def settings_of_rows(monkeypatch, two_threads):
    """`(rows, is oneDNN on, threads)` of every linear product."""
    seen, linear = [], F.linear

    def watched(x, *args):
        seen.append((x.numel() // x.shape[-1], *decode_step.read_settings()))
        return linear(x, *args)

    monkeypatch.setattr(F, "linear", watched)
    return seen


def serve(folder, kernels=DecodeKernels.OWN, dtype="bfloat16"):
    steps = {"decode_kernels": kernels, "decode_threads": 1}
    return runtime.load(folder, dtype=dtype, budget="50%", system="on-demand", **steps)


CHOSEN = [
    (torch.bfloat16, None, DecodeKernels.OWN),
    (torch.float16, 1.9, DecodeKernels.OWN),
    (torch.float16, 1.1, DecodeKernels.LIBRARY),
    (torch.float32, None, DecodeKernels.LIBRARY),
]


@pytest.mark.parametrize(("dtype", "ratio", "expected"), CHOSEN)
def test_choose_kernels__is_measured_only_where_it_is_not_known(
    monkeypatch, dtype, ratio, expected
):
    """A measurement may differ from process to process, and with it the bits."""

    def measure(*_):
        assert ratio is not None, "nothing is to be measured"
        return ratio

    monkeypatch.setattr(decode_step, "measure_kernel_speedup", measure)
    assert decode_step.choose_kernels(DecodeKernels.AUTO, dtype) is expected
    assert decode_step.choose_kernels(DecodeKernels.LIBRARY, dtype) is DecodeKernels.LIBRARY


THREADS = [(4, 1.9, 3), (4, 1.1, 1), (2, 1.9, 1), (1, 1.9, 1)]


@pytest.mark.parametrize(("processors", "ratio", "expected"), THREADS)
def test_choose_threads__leaves_one_processor(folder, monkeypatch, processors, ratio, expected):
    """And is one where several are hardly faster."""
    model = load_plain(folder, dtype=torch.float32)
    monkeypatch.setattr(decode_step, "measure_thread_speedup", lambda *_: ratio)
    monkeypatch.setattr(torch, "get_num_threads", lambda: processors)
    assert decode_step.choose_decode_threads(model, 1 << 20) == expected


def test_measurements__leave_the_settings_as_they_were(two_threads):
    before = decode_step.read_settings()
    assert decode_step.measure_kernel_speedup(torch.bfloat16, 2) > 0
    assert decode_step.measure_thread_speedup(8, 64, torch.float32, 2) > 0
    assert decode_step.read_settings() == before


def test_threads__of_quantised_products_are_as_many_as_usual(folder, two_threads):
    model, seen = load_plain(folder, dtype=torch.float32), []
    decode_step.apply_decode_threads(model, None, expert_bytes=1)
    model.lm_head.register_forward_hook(lambda *_: seen.append(decode_step.read_settings()[1:]))
    with torch.no_grad():
        model(PROMPT[:, :1])
    assert seen == [(1, 2)]


def load_reference(folder):
    model = load_plain(folder, dtype=torch.bfloat16, decode_kernels=DecodeKernels.OWN)
    decode_step.apply_decode_threads(model, 1, expert_bytes=1)
    return model


@pytest.mark.parametrize("load", [serve, load_reference])
def test_generate__single_tokens_have_settings_of_their_own(folder, settings_of_rows, load):
    model, usual = load(folder), decode_step.read_settings()
    settings_of_rows.clear()
    with torch.no_grad():
        past = model(PROMPT, use_cache=True).past_key_values
        assert {tuple(used) for _, *used in settings_of_rows} == {usual}
        settings_of_rows.clear()
        model(PROMPT[:, :1], past_key_values=past, use_cache=True)
    assert {tuple(used) for _, *used in settings_of_rows} == {(False, 1, 1)}
    assert decode_step.read_settings() == usual
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.tensor([[10**9]]))
    assert decode_step.read_settings() == usual


OTHERWISE = [(DecodeKernels.LIBRARY, "bfloat16"), (DecodeKernels.OWN, "float32")]


@pytest.mark.parametrize(("kernels", "dtype"), OTHERWISE)
def test_generate__otherwise_every_step_has_onednn(folder, settings_of_rows, kernels, dtype):
    model = serve(folder, kernels, dtype)
    with model.moecast:
        settings_of_rows.clear()
        model.generate(PROMPT, **GREEDY)
    assert {is_on for _, is_on, *_ in settings_of_rows} == {True}


def test_generate__a_number_that_is_set_later_counts_for_the_other_steps(folder, two_threads):
    model = serve(folder)
    with model.moecast:
        model.generate(PROMPT, **GREEDY)
        torch.set_num_threads(1)
        model.generate(PROMPT, **GREEDY)
        assert torch.get_num_threads() == 1


def test_lockstep__a_prompt_and_a_step_of_one_token_keep_their_own(folder, settings_of_rows):
    plain, prompts = load_reference(folder), [PROMPT, PROMPT + 1, PROMPT[:, :1] + 2]
    expected = [lockstep.answer(plain, prompt) for prompt in prompts]
    model, usual = serve(folder), decode_step.read_settings()
    settings_of_rows.clear()
    with model.moecast, LockstepGroup(model) as group:
        tasks = []
        for prompt in prompts:
            # Each begins while the others generate.
            tasks.append(group.start(partial(lockstep.answer, model, prompt)))
            group.step()
            assert decode_step.read_settings() == usual
        lockstep.run(group)
    lockstep.assert_equal(lockstep.results_of(tasks), expected)
    # Experts get single rows of prompts, too; attention gets whole steps.
    assert {tuple(used) for rows, *used in settings_of_rows if rows == PROMPT.numel()} == {usual}
    assert {tuple(used) for _, *used in settings_of_rows} == {usual, (False, 1, 1)}


ATTENTION = SimpleNamespace(num_key_value_groups=2, is_causal=True, **{decode_step.MARK: True})
QUERY_KEYS_VALUES = (4, 1, 16), (2, 9, 16), (2, 9, 16)


@pytest.fixture
def attention(monkeypatch):
    """PyTorch's, which keeps its calls."""
    watched = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return watched


@pytest.fixture
def without_own_kernel(monkeypatch):
    monkeypatch.setattr(decode_step, "attend_token", None)


@pytest.mark.parametrize("has_mask", [False, True])
def test_attend__one_token_is_rounded_once(attention, has_mask, without_own_kernel):
    """Heads that share keys are rows of one."""
    mask = torch.zeros(1, 1, 1, 9, dtype=torch.float64)
    mask[..., :4] = float("-inf") if has_mask else 0
    torch.manual_seed(0)
    inputs = [torch.randn(1, *shape, dtype=torch.bfloat16) for shape in QUERY_KEYS_VALUES]
    found, weights = decode_step.attend(ATTENTION, *inputs, mask.bfloat16() if has_mask else None)
    (call,) = attention.call_args_list
    assert (call.args[0].shape, call.kwargs.get("enable_gqa", False)) == ((1, 2, 2, 16), False)
    assert (weights, found.dtype) == (None, torch.bfloat16)
    expected, _ = sdpa_attention_forward(ATTENTION, *(x.double() for x in inputs), mask)
    assert torch.equal(found, expected.bfloat16())


HEADS = [(8, 8, 64, 64), (8, 1, 192, 128), (13, 1, 16, 32), (24, 2, 80, 80)]
"""Heads of the query and of keys, and their widths."""


@pytest.mark.skipif(decode_step.attend_token is None, reason="no compiled code")
@torch.no_grad()
@pytest.mark.parametrize(("heads", "groups", "width", "value_width"), HEADS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 256, 257, 1100])
def test_attend__own_kernel_is_exact_and_no_thread_changes_a_bit(
    heads, groups, width, value_width, tokens, attention
):
    torch.manual_seed(0)
    query = torch.randn(1, heads, 1, width).bfloat16()
    keys = torch.randn(1, groups, tokens + 5, width).bfloat16()[:, :, :tokens]
    values = torch.randn(1, tokens, groups, value_width).bfloat16().transpose(1, 2)
    module = SimpleNamespace(num_key_value_groups=heads // groups, **{decode_step.MARK: True})
    outputs = []
    for threads in (1, 2, 5):
        decode_step.own_threads.set(threads)
        outputs.append(decode_step.attend(module, query, keys, values, scaling=0.1)[0])
    decode_step.own_threads.set(0)
    assert not attention.called
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    shared = [x.double().repeat_interleave(heads // groups, 1) for x in (keys, values)]
    scores = query.double() @ shared[0].transpose(2, 3) * 0.1
    expected = (scores.softmax(-1) @ shared[1]).transpose(1, 2)
    torch.testing.assert_close(outputs[0].double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.skipif(decode_step.attend_token is None, reason="no compiled code")
@torch.no_grad()
def test_attend__own_kernel_passes_on_what_is_no_number():
    query, keys, values = (torch.ones(1, *s, dtype=torch.bfloat16) for s in QUERY_KEYS_VALUES)
    keys[0, 0, 5, 3], values[0, 1, 8, 2] = float("nan"), float("inf")
    output = decode_step.attend(ATTENTION, query, keys, values)[0][0, 0]
    assert output.isnan().all(1).tolist() == [True, True, False, False]
    assert output[2:].isinf().nonzero()[:, 1].tolist() == [2, 2]


@torch.no_grad()
@pytest.mark.parametrize("tokens", [40, 700])
def test_attend__rows_of_a_batch_have_the_bits_of_sequences_alone(tokens):
    """The batch of copies is what a block of sequences is compared with."""
    torch.manual_seed(0)
    query = torch.randn(8, 16, 1, 128).bfloat16()
    states = torch.randn(2, 8, 2, tokens, 128).bfloat16()
    module = SimpleNamespace(num_key_value_groups=8, **{decode_step.MARK: True})
    batch, _ = decode_step.attend(module, query, *states)
    sequences = [SequenceStates(list(part.split(1))) for part in states]
    assert torch.equal(decode_step.attend(module, query, *sequences)[0], batch)


LEFT = {
    "a mask": ({}, {"attention_mask": torch.zeros(1, 1, 1, 9)}),
    "a bias": ({}, {"position_bias": torch.zeros(1, 4, 1, 9, dtype=torch.bfloat16)}),
    "narrow heads": ({"width": 24}, {}),
    "another dtype": ({"dtype": torch.float16}, {}),
}


@torch.no_grad()
@pytest.mark.parametrize(("inputs", "options"), LEFT.values(), ids=LEFT)
def test_attend__leaves_others_to_pytorch(inputs, options, attention):
    dtype = inputs.get("dtype", torch.bfloat16)
    shapes = [(1, *shape[:2], inputs.get("width", 16)) for shape in QUERY_KEYS_VALUES]
    output, _ = decode_step.attend(ATTENTION, *(torch.ones(s).to(dtype) for s in shapes), **options)
    assert attention.called
    assert output.dtype is dtype
    assert torch.equal(output, torch.ones_like(output))


@pytest.mark.parametrize(("is_marked", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_model__only_a_marked_one_computes_in_float32(
    folder, attention, is_marked, dtype, without_own_kernel
):
    model = Qwen2MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if is_marked:
        decode_step.attend_in_float32(model)
    with torch.no_grad():
        past = model(PROMPT, use_cache=True).past_key_values
        model(PROMPT[:, :1], past_key_values=past, use_cache=True)
    dtypes = [call.args[0].dtype for call in attention.call_args_list]
    assert dtypes == [torch.bfloat16] * 3 + [dtype] * 3
