"""The number of threads of steps of one token: the decision, and the steps that it concerns."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import runtime
from runtime.config import ModelConfig
from runtime.errors import MoecastError
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf import decode_threads
from runtime.hf.decode_threads import apply_decode_threads, choose_decode_threads
from runtime.hf.loading import load_plain
from tests.builders.models import tiny_qwen2_moe

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
NEW_TOKENS = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0, "do_sample": False}


@pytest.fixture
def two_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


@pytest.fixture
def threads_of_rows(monkeypatch, two_threads):
    """`(rows, threads)` of every linear product."""
    seen = []
    linear = F.linear

    def watched(x, *args):
        seen.append((x.numel() // x.shape[-1], torch.get_num_threads()))
        return linear(x, *args)

    monkeypatch.setattr(F, "linear", watched)
    return seen


def serve(folder, number=1):
    config = ModelConfig(name="tiny", id=str(folder), dtype="float32", decode_threads=number)
    return runtime.load(config, budget="50%", system="on-demand")


@pytest.mark.parametrize(
    ("processors", "ratio", "expected"), [(4, 1.9, 3), (4, 1.1, 1), (2, 1.9, 1), (1, 1.9, 1)]
)
def test_choose__needs_a_clear_gain_and_leaves_one_processor(
    tmp_path, monkeypatch, processors, ratio, expected
):
    model = load_plain(tiny_qwen2_moe(tmp_path / "model"), dtype=torch.float32)
    monkeypatch.setattr(decode_threads, "measure_ratio", lambda *_: ratio)
    monkeypatch.setattr(torch, "get_num_threads", lambda: processors)
    assert choose_decode_threads(model, 1 << 20) == expected


def test_measure_ratio__leaves_the_threads_as_they_were(two_threads):
    assert decode_threads.measure_ratio(8, 64, torch.float32, 2) > 0
    assert torch.get_num_threads() == 2


def test_generate__single_tokens_have_their_own_number(tmp_path, threads_of_rows):
    model = serve(tiny_qwen2_moe(tmp_path / "model"))
    with model.moecast, torch.no_grad():
        threads_of_rows.clear()
        past = model(PROMPT, use_cache=True).past_key_values
        assert {threads for _, threads in threads_of_rows} == {2}
        threads_of_rows.clear()
        model(PROMPT[:, :1], past_key_values=past, use_cache=True)
        assert {threads for _, threads in threads_of_rows} == {1}
        assert torch.get_num_threads() == 2
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.tensor([[10**9]]))
        assert torch.get_num_threads() == 2


def test_generate__a_number_that_is_set_later_counts_for_the_other_steps(tmp_path, two_threads):
    model = serve(tiny_qwen2_moe(tmp_path / "model"))
    with model.moecast:
        model.generate(PROMPT, **NEW_TOKENS)
        torch.set_num_threads(1)
        model.generate(PROMPT, **NEW_TOKENS)
        assert torch.get_num_threads() == 1


def test_lockstep__a_prompt_and_a_step_of_one_token_keep_their_own(tmp_path, threads_of_rows):
    model = serve(tiny_qwen2_moe(tmp_path / "model"))
    with model.moecast, LockstepGroup(model) as group:
        threads_of_rows.clear()
        for start in range(3):
            # Each begins while the others generate.
            group.start(partial(model.generate, PROMPT + start, **NEW_TOKENS))
            group.step()
            assert torch.get_num_threads() == 2
        while group.sequences:
            group.step()
    # Experts get single rows of prompts, too; attention gets whole steps.
    assert {threads for rows, threads in threads_of_rows if rows == PROMPT.numel()} == {2}
    assert {1, 2} == {threads for _, threads in threads_of_rows}


def test_apply__a_reference_has_the_same_bits(tmp_path, two_threads):
    folder = tiny_qwen2_moe(tmp_path / "model")
    plain = load_plain(folder, dtype=torch.float32)
    apply_decode_threads(plain, 1, expert_bytes=1)
    expected = plain.generate(PROMPT, **NEW_TOKENS)
    model = serve(folder)
    with model.moecast:
        assert torch.equal(model.generate(PROMPT, **NEW_TOKENS), expected)


def test_config__names_the_smallest_number():
    with pytest.raises(MoecastError, match="decode_threads=0: must be at least 1"):
        ModelConfig(decode_threads=0)
