"""Steps of one token without oneDNN: the decision, the steps that it concerns, and their bits."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import runtime
from runtime.config import DecodeKernels, ModelConfig
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf import decode_kernels
from runtime.hf.decode_kernels import choose_kernels
from runtime.hf.loading import load_plain
from tests.builders.models import tiny_qwen2_moe

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
NEW_TOKENS = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0, "do_sample": False}


@pytest.fixture
def switch_states(monkeypatch):
    """`(rows, is oneDNN on)` of every linear product."""
    seen = []
    linear = F.linear

    def watched(x, *args):
        seen.append((x.numel() // x.shape[-1], torch.backends.mkldnn.enabled))
        return linear(x, *args)

    monkeypatch.setattr(F, "linear", watched)
    return seen


def serve(folder, how=DecodeKernels.OWN, dtype="bfloat16"):
    config = ModelConfig(name="tiny", id=str(folder), dtype=dtype, decode_kernels=how)
    return runtime.load(config, budget="50%", system="on-demand")


@pytest.mark.parametrize(
    ("dtype", "has_amx", "ratio", "expected"),
    [
        (torch.bfloat16, False, None, DecodeKernels.OWN),
        (torch.bfloat16, True, 1.9, DecodeKernels.OWN),
        (torch.bfloat16, True, 1.1, DecodeKernels.LIBRARY),
        (torch.float16, False, 1.9, DecodeKernels.OWN),
        (torch.float16, False, 1.1, DecodeKernels.LIBRARY),
        (torch.float32, False, None, DecodeKernels.LIBRARY),
    ],
)
def test_choose_kernels__is_measured_only_where_it_is_not_known(
    monkeypatch, dtype, has_amx, ratio, expected
):
    """A measurement may differ from process to process, and with it the bits."""

    def measure(*_):
        assert ratio is not None, "nothing is to be measured"
        return ratio

    monkeypatch.setattr(decode_kernels, "measure_ratio", measure)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert choose_kernels(DecodeKernels.AUTO, dtype) is expected
    assert choose_kernels(DecodeKernels.LIBRARY, dtype) is DecodeKernels.LIBRARY


def test_measure_ratio__leaves_the_switch_as_it_was():
    assert decode_kernels.measure_ratio(torch.bfloat16, torch.get_num_threads()) > 0
    assert torch.backends.mkldnn.enabled


def load_reference(folder):
    return load_plain(folder, dtype=torch.bfloat16, decode_kernels=DecodeKernels.OWN)


@pytest.mark.parametrize("load", [serve, load_reference])
def test_generate__single_tokens_go_without(tmp_path, switch_states, load):
    model = load(tiny_qwen2_moe(tmp_path / "model"))
    switch_states.clear()
    with torch.no_grad():
        past = model(PROMPT, use_cache=True).past_key_values
        assert all(is_on for _, is_on in switch_states)
        switch_states.clear()
        model(PROMPT[:, :1], past_key_values=past, use_cache=True)
    assert switch_states
    assert not any(is_on for _, is_on in switch_states)
    assert torch.backends.mkldnn.enabled
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.tensor([[10**9]]))
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize(("how", "dtype"), [(DecodeKernels.LIBRARY, "bfloat16"), (None, "float32")])
def test_generate__otherwise_every_step_has_it(tmp_path, switch_states, how, dtype):
    folder = tiny_qwen2_moe(tmp_path / "model")
    model = serve(folder, how or DecodeKernels.OWN, dtype)
    with model.moecast:
        switch_states.clear()
        model.generate(PROMPT, **NEW_TOKENS)
    assert all(is_on for _, is_on in switch_states)


def test_lockstep__a_prompt_and_a_step_of_one_token_keep_their_own(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model")
    plain = load_reference(folder)
    prompts = [PROMPT, PROMPT + 1, PROMPT[:, :1] + 2]

    def scores(model, prompt):
        result = model.generate(
            prompt, **NEW_TOKENS, output_logits=True, return_dict_in_generate=True
        )
        return torch.cat(result.logits)

    expected = [scores(plain, prompt) for prompt in prompts]
    model = serve(folder)
    with model.moecast, LockstepGroup(model) as group:
        tasks = []
        for prompt in prompts:
            # Each begins while the others generate.
            tasks.append(group.start(partial(scores, model, prompt)))
            group.step()
            assert torch.backends.mkldnn.enabled
        while group.sequences:
            group.step()
    assert [task.error for task in tasks] == [None] * len(prompts)
    assert all(map(torch.equal, [task.result for task in tasks], expected))
