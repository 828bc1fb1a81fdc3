"""Each option of a checkpoint's generation_config.json is honoured, replaced or refused."""

import logging

import pytest
import torch
from transformers import GenerationConfig

from runtime.errors import CheckpointError
from runtime.hf.generation_settings import REFUSED, REPLACED, TOKEN_IDS
from runtime.hf.loading import load_plain, load_stripped
from tests.builders.models import changed, plain_eager
from tests.builders.served import serving

SETTINGS = "generation_config.json"
HONOURED = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff",
    "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "renormalize_logits",
    "remove_invalid_values", "exponential_decay_length_penalty", "watermarking_config",
    "min_length", "min_new_tokens", "max_length", "max_new_tokens",
}  # fmt: skip
"""They choose tokens. Lengths are defaults, which every command sets."""
WITHOUT_EFFECT = {
    "early_stopping", "length_penalty", "diversity_penalty", "low_memory", "disable_compile",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "transformers_version",
}  # fmt: skip
"""Of searches and drafts that other options would begin."""


def generate(model, **options):
    tokens = torch.tensor([[5, 9, 5, 9, 5]])
    return model.generate(tokens, max_new_tokens=12, do_sample=False, **options)


def test_options__of_this_transformers_are_all_decided():
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    decided = [HONOURED, WITHOUT_EFFECT, {*REPLACED}, {*REFUSED}, {*TOKEN_IDS}]
    assert set.union(*decided) == known
    assert sum(map(len, decided)) == len(known)


@pytest.mark.parametrize("file", [SETTINGS, "config.json"])
def test_replaced_options__change_neither_tokens_nor_work(file, folder, tmp_path, caplog):
    asked = "return_dict_in_generate", "output_attentions", "output_hidden_states"
    left = {"use_cache": False, **dict.fromkeys(asked, True)}
    if file != SETTINGS:
        left |= {"return_dict": False, "output_router_logits": True}
    else:
        left |= {"output_scores": True, "cache_implementation": "static", "max_time": 1e-9}
        left |= {"num_beams": 3, "num_return_sequences": 2, "prompt_lookup_num_tokens": 2}
    target = changed(folder, tmp_path / "m", file, **left)
    if file != SETTINGS:
        (target / SETTINGS).unlink()
    outputs, requested = [], []
    for where in (folder, target):
        caplog.clear()
        with serving(where, budget="50%", system="on-demand") as model:
            outputs.append(generate(model))
            requested.append(model.moecast.stats()["requests"])
    assert torch.equal(*outputs)
    assert requested[0] == requested[1]
    (line,) = (line for line in caplog.messages if "not used are" in line)
    assert all(name in line for name in left)
    assert torch.equal(generate(load_plain(target, dtype="auto")), outputs[0])


def test_honoured_options__choose_the_tokens_of_plain_transformers(folder, tmp_path, caplog):
    plain = generate(plain_eager(folder))
    options = {"no_repeat_ngram_size": 2, "suppress_tokens": [plain[0, 5].item()], "top_k": -1}
    options |= {"temperature": 2, "forced_eos_token_id": 3}
    target = changed(folder, tmp_path / "m", SETTINGS, **options)
    with caplog.at_level(logging.WARNING), serving(target, system="on-demand") as model:
        tokens = generate(model)
        drawn = model.generate(torch.tensor([[5]]), max_new_tokens=2, do_sample=True)
    assert drawn.shape == (1, 3)
    assert torch.equal(tokens, generate(plain_eager(target)))
    assert not torch.equal(tokens, plain)
    assert not any("not used are" in line for line in caplog.messages)


SENSELESS = [
    ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ({"eos_token_id": [1, 10**30]}, "eos_token_id"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 .*strictly positive"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"typical_p": "high"}, "typical_p='high'"),
    ({"no_repeat_ngram_size": "x"}, "no_repeat_ngram_size='x'"),
    ({"bad_words_ids": [[64]]}, r"bad_words_ids=\[\[64\]\]"),
    ({"stop_strings": ["."]}, "stop_strings is not supported"),
    ({"guidance_scale": 1.5}, "guidance_scale is not supported"),
    ({"cache_implementation": "evil"}, "Transformers cannot load it"),
    ({"do_sample": "false"}, "do_sample='false' .it is no bool"),
    ({"max_length": "20"}, "max_length='20' .it is no int"),
]


@pytest.mark.parametrize(("fields", "message"), SENSELESS)
def test_options__of_which_nothing_can_be_made_are_refused(fields, message, folder, tmp_path):
    target = changed(folder, tmp_path / "m", SETTINGS, **fields)
    for load in (load_stripped, load_plain):
        with pytest.raises(CheckpointError, match=message):
            load(target, dtype="auto")
