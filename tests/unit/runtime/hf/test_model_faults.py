"""Checkpoints whose configuration fits nothing are refused in a line that names the folder."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from runtime.config import ModelConfig
from runtime.errors import CheckpointError, PromptFileError
from runtime.generation.batch.prompts import PromptEncoder, read_prompts
from runtime.hf.layers import find_moe_layers, find_top_k
from runtime.hf.loading import build_skeleton, load_plain, load_stripped, read_config
from runtime.hf.model_faults import check_tokens, explain_loading
from runtime.tools.verify.reference import load_plain_model
from tests.builders.families.build import tiny_model
from tests.builders.families.table import FAMILIES
from tests.builders.models import changed
from tests.builders.quantised import rewrite

NO_FIT = {
    "hidden_size": [0, 10**12], "num_attention_heads": [0, 7], "num_key_value_heads": [-1],
    "vocab_size": [5, -1], "moe_intermediate_size": [-3], "pad_token_id": [10**9],
    "rope_parameters": [{"rope_type": "evil"}], "dtype": ["int8"], "hidden_act": ["evil"],
    "decoder_sparse_step": [0], "attn_implementation": ["evil"],
    "transformers_weights": ["../model.safetensors"],
}  # fmt: skip
PAIRS = [(field, value) for field, values in NO_FIT.items() for value in values]


@pytest.mark.parametrize(("field", "value"), PAIRS, ids=str)
def test_load__configurations_that_fit_nothing_name_the_folder(field, value, folder, tmp_path):
    target = changed(folder, tmp_path / "m", "config.json", **{field: value})
    with pytest.raises(CheckpointError, match=str(target)):
        load_stripped(target, "auto")


def rewritten(folder: Path, tmp_path: Path, change) -> Path:
    return rewrite(shutil.copytree(folder, tmp_path / "m"), change)


FAULTS = {
    "missing": (lambda *_: {}, "has no tensor for {}"),
    "missing expert": (lambda *_: {}, "{}"),
    "shorter": (lambda key, it: {key: it[:-1]}, r"{} is \(\d.*\) in the checkpoint, \("),
    "int32": (lambda key, it: {key: it.to(torch.int32)}, "{} .* means nothing without"),
    "complex64": (lambda key, it: {key: it.to(torch.complex64)}, "{} .* means nothing without"),
}
"""Changes of a tensor, and the words about its name."""
LAYER = "model.layers.1"
GATE = f"{LAYER}.mlp.gate.weight"
UP, DOWN = f"{LAYER}.mlp.experts.5.up_proj.weight", f"{LAYER}.mlp.experts.7.down_proj.weight"
DENSE = ["lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"]


SPOILT = [
    *(("missing", name) for name in (*DENSE, GATE)),
    *(("missing expert", name) for name in (UP, DOWN)),
    *(("shorter", name) for name in (GATE, f"{LAYER}.self_attn.k_proj.bias")),
    *((dtype, name) for dtype in ("int32", "complex64") for name in (GATE, UP)),
]


@pytest.mark.parametrize("load", [load_stripped, load_plain], ids=["served", "plain"])
@pytest.mark.parametrize(("fault", "name"), SPOILT)
def test_load__a_tensor_that_is_not_the_models_is_named_in_one_line(
    load, fault, name, folder, tmp_path, caplog
):
    """It is neither made up, nor cast."""
    change, message = FAULTS[fault]
    target = rewritten(folder, tmp_path, lambda k, it: change(k, it) if k == name else {k: it})
    with pytest.raises(CheckpointError, match=message.format(name)):
        load(target, dtype="auto")
    assert ".experts." in name or not any("LOAD REPORT" in line for line in caplog.messages)


def test_load__experts_that_are_all_transposed_are_refused(folder, tmp_path):
    """They have as many numbers as those of the configuration."""
    target = rewritten(folder, tmp_path, lambda k, it: {k: it.t() if ".up_proj" in k else it})
    with pytest.raises(CheckpointError, match="they are not of one model"):
        load_stripped(target, "auto")


def test_load__an_expert_more_than_the_configuration_says_is_named(folder, tmp_path):
    def repeat_first(key: str, it: torch.Tensor) -> dict[str, torch.Tensor]:
        return {key: it, key.replace(".experts.0.", ".experts.12."): it.clone()}

    target = rewritten(folder, tmp_path, repeat_first)
    with pytest.raises(CheckpointError, match="configuration says 12 experts"):
        load_stripped(target, "auto")


def test_load__a_tensor_that_is_tied_may_be_missing(folder, tmp_path):
    target = changed(folder, tmp_path / "m", "config.json", tie_word_embeddings=True)
    rewrite(target, lambda key, tensor: {} if key == "lm_head.weight" else {key: tensor})
    model = load_stripped(target, "auto").model
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    rewrite(target, lambda key, tensor: {} if "embed_tokens" in key else {key: tensor})
    with pytest.raises(CheckpointError, match=r"no tensor for lm_head\.weight, model\.embed"):
        load_stripped(target, "auto")


@pytest.mark.parametrize("k", [-1, 0, 13])
def test_top_k__out_of_range_is_refused_before_weights_are_read(k, folder, tmp_path, monkeypatch):
    target = changed(folder, tmp_path / "m", "config.json", num_experts_per_tok=k)
    message = rf"{target}: a token cannot use {k} \(num_experts_per_tok\) of 12 experts; fetch"
    with pytest.raises(CheckpointError, match=message):
        load_plain_model(ModelConfig(name="m", id=str(target)), torch.device("cpu"))
    skeleton = build_skeleton(target, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=message):
        find_top_k(skeleton.model, skeleton.layers)
    monkeypatch.setattr("runtime.hf.loading.open_safetensors", None)
    with pytest.raises(CheckpointError, match=message):
        load_stripped(target, "auto")


FIT = (4, 2, 4)
GROUPS = [FIT, (4, 2, 5), (4, 5, 2), (3, 1, 2), (0, 0, 2), (None, 1, 2), (4, 0, 2)]
"""Groups, those that a token's experts are of, and how many it has."""


@pytest.mark.parametrize("numbers", GROUPS, ids=str)
def test_groups_of_experts__must_hold_those_of_a_token(numbers):
    sizes = dict(zip(("n_group", "topk_group", "num_experts_per_tok"), numbers, strict=True))
    model = tiny_model(FAMILIES["deepseek_v3"].changed(**sizes))
    refused = pytest.raises(CheckpointError, match="of 8 experts, in ")
    with nullcontext() if numbers == FIT else refused:
        assert find_top_k(model, find_moe_layers(model)) == 4


def test_loading__errors_of_disk_and_memory_stay_what_they_are():
    for error in (MemoryError(), OSError(5, "Input/output error"), RuntimeError("allocate memory")):
        with pytest.raises(type(error)), explain_loading(Path("m")):
            raise error


def test_tokens__that_the_model_does_not_know_are_refused(folder, tmp_path):
    config = read_config(folder)
    check_tokens([0, 63], config)
    with pytest.raises(CheckpointError, match="gives the token 64, the model knows 64 tokens"):
        check_tokens([0, 64], config)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}')
    encoder = PromptEncoder(config, lambda _: {"input_ids": [99]})  # type: ignore[arg-type]
    with pytest.raises(PromptFileError, match="line 1: the tokenizer gives the token 99"):
        read_prompts(prompts, encoder, max_new_tokens=1)
