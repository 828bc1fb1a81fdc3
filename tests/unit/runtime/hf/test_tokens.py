"""EOS and pad ids, context length and padding, as a model's configuration states them."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig, Qwen2MoeConfig

from runtime.hf.tokens import context_length, eos_token_ids, pad_batch, pad_token_id


def model_with(eos=None, pad=None, config_pad=None):
    config = Qwen2MoeConfig(pad_token_id=config_pad, max_position_embeddings=77)
    return SimpleNamespace(
        generation_config=GenerationConfig(eos_token_id=eos, pad_token_id=pad), config=config
    )


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (7, (7,)), ([9, 7], (9, 7))])
def test_eos_token_ids__keeps_the_configured_order(eos, expected):
    assert eos_token_ids(model_with(eos)) == expected


def test_eos_token_ids__is_empty_without_generation_settings():
    assert eos_token_ids(SimpleNamespace(generation_config=None)) == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos": [9, 7], "pad": 3, "config_pad": 4}, 3),
        ({"eos": [9, 7], "config_pad": 4}, 4),
        ({"eos": [9, 7]}, 7),
        ({}, 0),
    ],
)
def test_pad_token_id__falls_back_to_the_eos_id(settings, expected):
    assert pad_token_id(model_with(**settings)) == expected


def test_context_length__is_the_configured_limit():
    assert context_length(model_with().config) == 77


def test_pad_batch__pads_on_the_left_and_masks_the_padding():
    tokens, mask = pad_batch([(1, 2, 3), (4,)], 9)
    assert tokens.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_pad_batch__pads_on_the_right_for_an_encoder():
    tokens, mask = pad_batch([(1, 2, 3), (4,)], 9, left=False)
    assert tokens.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
