"""EOS and pad ids, context length and padding, as a model's configuration states them."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig, Qwen2MoeConfig

from runtime.errors import CheckpointError
from runtime.hf.loading import read_config
from runtime.hf.tokens import context_length, eos_token_ids, pad_batch, pad_token_id
from runtime.store.model_check import CONFIG
from tests.builders.models import changed


def model_with(eos=None, pad=None, config_pad=None):
    given = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    return SimpleNamespace(generation_config=given, config=Qwen2MoeConfig(pad_token_id=config_pad))


EOS = [(None, ()), (7, (7,)), ([9, 7], (9, 7)), ([], ()), ([-1, 7, 10**6], (7,))]


@pytest.mark.parametrize(("eos", "expected"), EOS)
def test_eos_token_ids__keeps_the_configured_order(eos, expected):
    assert eos_token_ids(model_with(eos)) == expected
    assert eos_token_ids(SimpleNamespace(generation_config=None)) == ()


PADS = [
    ({"eos": [9, 7], "pad": 3, "config_pad": 4}, 3),
    ({"eos": [9, 7], "config_pad": 4}, 4),
    ({"eos": [9, 7]}, 7),
    ({"eos": [9, 10**6], "pad": -1, "config_pad": -1}, 9),
    ({}, 0),
]


@pytest.mark.parametrize(("settings", "expected"), PADS)
def test_pad_token_id__falls_back_to_the_eos_id(settings, expected):
    assert pad_token_id(model_with(**settings)) == expected


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"


LENGTHS = [
    ({}, 256),
    ({"rope_parameters": YARN}, 1024),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1024),
    ({"rope_scaling": YARN | {ORIGINAL: 128}}, 512),
    ({"rope_parameters": YARN | {ORIGINAL: 256}, "max_position_embeddings": 1024}, 1024),
    ({"rope_scaling": {"type": "linear", "factor": 4}}, 1024),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.5}}, 640),
    ({"rope_scaling": LLAMA3 | {ORIGINAL: 64}}, 256),
]


@pytest.mark.parametrize(("fields", "expected"), LENGTHS, ids=str)
def test_context_length__counts_what_rotary_embeddings_extend(fields, expected, folder, tmp_path):
    settings = {"max_position_embeddings": 256, "rope_parameters": None, **fields}
    config = read_config(changed(folder, tmp_path / "m", CONFIG, **settings))
    assert context_length(config) == expected


@pytest.mark.parametrize("factor", ["4", float("nan"), float("inf"), [4]])
def test_context_length__a_factor_that_is_no_number_is_refused(factor, folder, tmp_path):
    config = read_config(changed(folder, tmp_path / "m", CONFIG, max_position_embeddings=256))
    config.rope_parameters = {"rope_type": "yarn", "factor": factor}
    with pytest.raises(CheckpointError, match=r"factor of yarn .rope_scaling. is .*, no number"):
        context_length(config)


def test_pad_batch__pads_on_the_left_and_masks_the_padding():
    tokens, mask = pad_batch([(1, 2, 3), (4,)], 9)
    assert (tokens.tolist(), mask.tolist()) == ([[1, 2, 3], [9, 9, 4]], [[1, 1, 1], [0, 0, 1]])


def test_pad_batch__pads_on_the_right_for_an_encoder():
    tokens, mask = pad_batch([(1, 2, 3), (4,)], 9, left=False)
    assert (tokens.tolist(), mask.tolist()) == ([[1, 2, 3], [4, 9, 9]], [[1, 1, 1], [1, 0, 0]])
