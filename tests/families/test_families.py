"""Every Mixture-of-Experts family of Transformers, served from a quarter of its experts, is bitwise
plain Transformers with all of them: logits, and the tokens that `generate` makes of them. The
probes report what the experts are called with."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from predictors.base import Signal
from runtime.errors import CheckpointError
from runtime.generation.lockstep.group import LockstepGroup
from runtime.generation.prefix_cache import PrefixCache, find_prefix_obstacle
from runtime.hf.layers import find_adapter, find_expert_banks, find_moe_layers
from runtime.hf.loading import load_plain
from runtime.hf.probes import Probes
from tests.builders.families.build import UnbuildableError, save_family, tiny_config, tiny_model
from tests.builders.families.outputs import outputs
from tests.builders.families.table import FAMILIES, FUSED, PER_EXPERT, Family
from tests.builders.listeners import ProbeLog
from tests.builders.lockstep import results_of, run
from tests.builders.served import serve, serve_few
from tests.unit.runtime.generation.test_prefix_cache import generate, go_on

SERVED = [family for family in FAMILIES.values() if not family.refused]
REFUSED = [family for family in FAMILIES.values() if family.refused]


def named(*names: str) -> list[Family]:
    return [FAMILIES[name] for name in names]


def each(families: list[Family]):
    return pytest.mark.parametrize("family", families, ids=[family.name for family in families])


def outputs_in_a_group(model: PreTrainedModel) -> dict[str, Tensor]:
    """The same, in step with two others, which end earlier; one begins later."""
    other = torch.tensor([[7, 11, 13, 17, 19]])
    decoder = {"decoder_input_ids": other} if model.config.is_encoder_decoder else {}
    with LockstepGroup(model) as group:
        members = [group.start(partial(outputs, model), seed=0)]
        members.append(group.start(partial(outputs, model, num_tokens=2), seed=0))
        group.step()
        members.append(group.start(lambda: model(input_ids=other, **decoder), seed=1))
        run(group)
    return results_of(members)[0]


def check(folder: Path, family: Family, dtype: torch.dtype) -> None:
    expected = outputs(load_plain(folder, dtype=dtype))
    assert torch.isfinite(expected["logits"]).all()
    assert ("tokens of a prompt" in expected) == family.generates
    model = serve_few(folder, dtype=dtype)
    kinds = {find_adapter(module).name for module in find_expert_banks(model).values()}
    assert kinds == set(family.served.split(", "))
    with model.moecast as handle:
        for found in (outputs(model), outputs_in_a_group(model)):
            equal = {name: torch.equal(found[name], value) for name, value in expected.items()}
            assert equal == dict.fromkeys(expected, True)
            stats = handle.stats()
            # Experts were dropped and fetched again.
            assert family.always_same or stats["misses"] > stats["arena_slots"]


WHOLE_PROMPTS = {
    *("axk2", "deepseek_v32", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4", "mistral_large4"),
    *("deepseek_v4", "minimax_m3_vl", "qwen4_exp", "unlimited_ocr"),
    *("diffusion_gemma", "jamba", "minimax", "nllb_moe", "openai_privacy_filter"),
    *("qwen3_omni_moe", "switch_transformers"),
}
"""Families whose prompts are computed whole, whatever was computed before."""


@pytest.mark.slow
@each(SERVED)
def test_prefix__every_family_goes_on_with_a_text_or_computes_whole_prompts(family):
    model = tiny_model(family)
    obstacle = find_prefix_obstacle(model)
    assert (obstacle is not None) == (family.name in WHOLE_PROMPTS), obstacle
    if obstacle is not None:
        return
    tokens = torch.randint(5, 60, (54,), generator=torch.Generator().manual_seed(0)).tolist()
    kept = PrefixCache(model)
    for length, reused in ((40, 0), (54, 40)):
        found = go_on(kept, model, tokens[:length], 1, reused=reused)
    assert torch.allclose(found.logits[0], generate(model, tokens, 1).logits[0], atol=1e-4)


def expert_keys(folder: Path) -> list[str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1, "several shards"
    return [key for key in index if re.search(r"expert|moe|ffn|mlp", key)]


@pytest.mark.slow
@each(SERVED)
def test_load__every_family_is_bitwise_eager(tmp_path, family):
    folder = save_family(tmp_path / "model", family)
    one_each = any(re.search(r"experts?[._]\d+\.", key) for key in expert_keys(folder))
    assert family.layout == (PER_EXPERT if one_each else FUSED)
    check(folder, family, torch.float32)


@pytest.mark.slow
@each(named("gpt_oss", "nemotron_h", "inkling2", "longcat_flash", "openai_privacy_filter"))
def test_load__bfloat16_is_bitwise_eager_too(tmp_path, family):
    check(save_family(tmp_path / "model", family, dtype=torch.bfloat16), family, torch.bfloat16)


@pytest.mark.slow
@each(named("mixtral", "kimi_linear", "inkling", "deepseek_ocr2"))
def test_load__checkpoints_as_the_model_holds_them_in_memory(tmp_path, family):
    folder = save_family(tmp_path / "model", family, fused=True)
    assert not any(re.search(r"experts?[._]\d+\.", key) for key in expert_keys(folder))
    check(folder, family, torch.float32)


def test_load__a_model_of_models_is_served_through_its_parts(tmp_path):
    """qwen3_omni_moe as the Hub has it: a thinker and a talker without a common forward pass."""
    code = {"num_code_groups": 4, "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1}
    sizes = {"thinker_hidden_size": 32, "spatial_merge_size": 2, "num_code_groups": 4}
    text = {"text_config": {"shared_expert_intermediate_size": 16}, "accept_hidden_layer": 1}
    changes = {
        "thinker_config": FAMILIES["qwen3_omni_moe"].changes,
        "talker_config": {**text, **sizes, "code_predictor_config": code},
        "code2wav_config": {"codebook_size": 96, "num_quantizers": 4, "decoder_dim": 64},
    }
    folder = save_family(tmp_path / "model", Family("qwen3_omni_moe", changes=changes))
    tokens = torch.arange(2, 11).reshape(1, 9)
    options = {"thinker_max_new_tokens": 12, "thinker_do_sample": False, "return_audio": False}
    expected = load_plain(folder, dtype=torch.float32).generate(input_ids=tokens, **options)
    model = serve_few(folder, dtype=torch.float32)
    with model.moecast as handle:
        assert torch.equal(model.generate(input_ids=tokens, **options), expected)
        assert handle.stats()["num_decode_steps"] == 11, "one token of the first step"


@each(REFUSED)
def test_load__refuses_unserved_models(tmp_path, family):
    folder = tmp_path / "model"
    try:
        save_family(folder, family)
    except UnbuildableError:
        tiny_config(family).save_pretrained(folder)
    with pytest.raises(CheckpointError):
        serve(folder)


def test_families__none_of_transformers_is_left_out():
    names = "num_experts|n_routed_experts|num_local_experts|moe_num_experts|top_k_experts"
    counts_experts = re.compile(rf"^ +({names})\b *[:=]", re.MULTILINE)
    models = Path(transformers.__file__).parent / "models"
    files = models.glob("*/configuration_*.py")
    found = {file.parent.name for file in files if counts_experts.search(file.read_text())}
    assert found == set(FAMILIES)


@each(SERVED)
def test_probes__report_what_the_experts_are_called_with(family):
    model = tiny_model(family)
    model.set_experts_implementation("eager")
    layers = find_moe_layers(model)
    called: dict[int, list[list[Tensor]]] = {layer.index: [] for layer in layers}
    heard = ProbeLog()

    def keep(index, _module, args, kwargs):
        given = [*args, *kwargs.values()]
        called[index].append([value for value in given if isinstance(value, Tensor)])

    for layer in layers:
        layer.experts.register_forward_pre_hook(partial(keep, layer.index), with_kwargs=True)
    tokens = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad(), Probes(model, set(Signal), heard, complete=True):
        model(input_ids=tokens, **decoder)
    begun = heard.of("begin_step")
    assert len(begun) == len(heard.of("end_step")) == (2 if decoder else 1)
    for tokens_T, requests_T in begun:
        assert np.array_equal(tokens_T, tokens.reshape(-1))
        assert requests_T.shape == tokens_T.shape
    for layer in layers:
        routed = heard.of("routed", layer.index)
        for experts_TK, logits_TE, weights_TK in routed:
            num_tokens = len(experts_TK)
            # A diffusion model's decoder computes a canvas of tokens that are not in the input.
            if not hasattr(model.config, "canvas_length"):
                assert num_tokens == len(begun[0][0])
            assert experts_TK.min() >= 0
            assert logits_TE is None or logits_TE.shape == (num_tokens, layer.num_experts)
            assert weights_TK is None or weights_TK.shape == experts_TK.shape
            for name in ("layer_input", "gate_input"):
                assert len(heard.of(name, layer.index)[0][0]) == num_tokens
        if family.served == "interface":
            for event, given in zip(routed, called[layer.index], strict=True):
                assert np.array_equal(event[0], given[1].numpy())
                assert np.array_equal(event[2], given[2].float().numpy())
    assert len(heard.chosen()) >= 2
