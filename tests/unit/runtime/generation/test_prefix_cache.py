"""Texts that go on with a kept KV cache are bitwise Transformers' with the same
`past_key_values`; what is kept is the longest common prefix, within its limit."""

import copy
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel, Qwen2MoeConfig, StoppingCriteriaList

from runtime.generation.drafting import drafting_options
from runtime.generation.prefix_cache import (
    MIN_TOKENS,
    PrefixCache,
    RunningText,
    find_prefix_obstacle,
)
from tests.builders.families.build import tiny_model

PROMPT = list(range(10, 50))
QUESTION = [60, 7, 61, 8, 62]
UNLIKE = [5, 3]


def model_and_cache(family: str, **options: bool) -> tuple[PreTrainedModel, PrefixCache]:
    model = tiny_model(family)
    return model, PrefixCache(model, **options)


def generate(model: PreTrainedModel, tokens: list[int], number: int, **options: Any) -> Any:
    """Greedily so many tokens, with their logits."""
    inputs = torch.tensor([tokens])
    options |= {"attention_mask": torch.ones_like(inputs), "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(inputs, max_new_tokens=number, min_new_tokens=number, **options)


def run(text: RunningText, model: PreTrainedModel, tokens: list[int], *given, **options) -> Any:
    """The same with a kept text."""
    options |= {"past_key_values": text.cache, "stopping_criteria": StoppingCriteriaList([text])}
    return generate(model, tokens, *given, **options)


def go_on(kept, model, tokens: list[int], number: int = 4, *, reused: int, **options: Any) -> Any:
    """The same with what is kept, which are so many of the tokens."""
    text = kept.begin(tokens)
    assert text.num_reused == reused
    found = run(text, model, tokens, number, **options)
    kept.end(text)
    return found


def answer(found: Any) -> list[int]:
    return found.sequences[0].tolist()


def require_same(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


CONVERSING = ["qwen2_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "lfm2_moe", "zaya"]


@pytest.mark.parametrize("family", CONVERSING)
def test_conversation__is_transformers_with_the_same_past(family: str) -> None:
    """Full attention, latent attention, windows, and recurrent, convolved and mixed layers."""
    model, kept = model_and_cache(family)
    assert find_prefix_obstacle(model) is None
    first = go_on(kept, model, PROMPT, 12, reused=0)
    expected = generate(model, PROMPT, 12)
    require_same(first, expected)
    past = expected.past_key_values
    turn = answer(first) + QUESTION
    branched = copy.deepcopy(kept)
    # The last token of an answer was not computed.
    second = go_on(kept, model, turn, 12, reused=len(PROMPT) + 11)
    expected = generate(model, turn, 12, past_key_values=past)
    require_same(second, expected)
    third = go_on(kept, model, answer(second) + QUESTION, reused=len(turn) + 11)
    require_same(third, generate(model, answer(second) + QUESTION, 4, past_key_values=past))
    # An answer that is sent back otherwise than it was written.
    changed = [*PROMPT, *UNLIKE, *QUESTION]
    other = go_on(branched, model, changed, reused=len(PROMPT))
    prompt = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([PROMPT]), past_key_values=prompt, logits_to_keep=1)
    require_same(other, generate(model, changed, 4, past_key_values=prompt))
    assert torch.allclose(other.logits[0], generate(model, changed, 1).logits[0], atol=1e-4)


def test_text__is_cut_where_a_prompt_leaves_it() -> None:
    model, kept = model_and_cache("qwen2_moe")
    go_on(kept, model, PROMPT, 12, reused=0)
    past = generate(model, PROMPT, 12).past_key_values
    past.crop(20 - past.get_seq_length())
    tokens = PROMPT[:20] + QUESTION
    found = go_on(kept, model, tokens, reused=20)
    require_same(found, generate(model, tokens, 4, past_key_values=past))
    go_on(kept, model, PROMPT[: MIN_TOKENS - 1] + QUESTION, reused=0)


def test_window__is_cut_until_it_has_dropped_a_token() -> None:
    model = tiny_model("exaone_moe")
    model.config.get_text_config().sliding_window = 64
    kept = PrefixCache(model)
    go_on(kept, model, PROMPT, 12, reused=0)
    go_on(kept, model, PROMPT[:30] + QUESTION, reused=30)
    go_on(kept, model, PROMPT, 40, reused=len(PROMPT) - 1)  # fills the window
    go_on(kept, model, PROMPT[:30] + UNLIKE, reused=30)
    kept.forget()
    go_on(kept, model, PROMPT, 40, reused=0)
    go_on(kept, model, PROMPT[:30] + UNLIKE, reused=0)


def test_texts__that_go_on_at_the_same_time_share_nothing_that_changes() -> None:
    model, kept = model_and_cache("qwen3_next")
    first, shared = go_on(kept, model, PROMPT, 12, reused=0), len(PROMPT) + 11
    tokens = [answer(first) + QUESTION, answer(first) + UNLIKE]
    expected = [answer(go_on(copy.deepcopy(kept), model, one, reused=shared)) for one in tokens]
    texts = [kept.begin(one) for one in tokens]
    for one, text, same in zip(tokens, texts, expected, strict=True):
        assert text.num_reused == shared
        assert answer(generate(model, one, 4, past_key_values=text.cache)) == same
    assert answer(go_on(kept, model, tokens[0], reused=shared)) == expected[0]


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "qwen3_next"])
def test_text__that_an_error_cuts_short_in_a_layer_keeps_what_came_before(family: str) -> None:
    """As a Ctrl-C or a failed read does."""
    model, kept = model_and_cache(family)
    text = kept.begin(PROMPT)
    fail = Mock(side_effect=[None] * 5 + [KeyboardInterrupt])
    hook = model.get_decoder().layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(text, model, PROMPT, 12)
    hook.remove()
    kept.end(text, is_intact=False)
    tokens = answer(generate(model, PROMPT, 4)) + QUESTION
    reused = len(PROMPT) + 4 if family == "qwen2_moe" else len(PROMPT)
    found = go_on(kept, model, tokens, reused=reused)
    assert torch.allclose(found.logits[0], generate(model, tokens, 4).logits[0], atol=1e-4)


def test_drafts__go_on_with_a_kept_text() -> None:
    model, kept = model_and_cache("gpt_oss")
    for one, reused in ((PROMPT * 2, 0), (PROMPT * 4, len(PROMPT * 2))):
        drafting = drafting_options(model, "prompt-lookup")
        found = go_on(kept, model, one, 12, reused=reused, **drafting)
        assert answer(found) == answer(generate(model, one, 12))


def test_rope__by_length_bounds_what_goes_on() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    config = Qwen2MoeConfig(rope_parameters={**rope, "original_max_position_embeddings": 32})
    model: Any = SimpleNamespace(config=config)
    kept = PrefixCache(model)
    assert kept.begin(PROMPT[:33]) is None
    assert kept.begin(PROMPT[:32]) is not None


# ---- the books

NUM_HEADS, WIDTH = 2, 4
TOKEN_BYTES = 2 * 2 * NUM_HEADS * WIDTH * 4  # two layers of keys and values in float32


def compute(text: RunningText, tokens: list[int], num_prompt: int) -> None:
    """What a forward pass of each token writes: states that have its id as their values."""

    def add(part: list[int]) -> None:
        states = torch.tensor(part).float()[:, None].expand(1, NUM_HEADS, len(part), WIDTH)
        for layer in range(2):
            text.cache.update(states, states + layer, layer)

    add(tokens[text.num_reused : num_prompt])
    for length in range(num_prompt, len(tokens)):
        text(torch.tensor([tokens[: length + 1]]), None)
        add(tokens[length : length + 1])
    text(torch.tensor([[*tokens, 0]]), None)


def held(text: RunningText) -> list[int]:
    """The tokens whose states the cache has."""
    if not text.num_reused:
        return []
    layer = text.cache.layers[1]
    assert torch.equal(layer.keys[0, 0, :, 0], layer.keys[0, 1, :, 3])
    assert torch.equal(layer.values, layer.keys + 1)
    return layer.keys[0, 0, :, 0].long().tolist()


WORDS = st.integers(0, 2).map(lambda word: [word] * 12)
TEXTS = st.lists(WORDS, min_size=1, max_size=6).map(lambda words: [t for w in words for t in w])


TURN = st.tuples(TEXTS, st.integers(1, 5), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(TURN, max_size=12), st.integers(0, 300))
def test_books__longest_common_prefix_within_the_limit(turns, limit_tokens) -> None:
    config = Qwen2MoeConfig(num_hidden_layers=2)
    kept = PrefixCache(SimpleNamespace(config=config, device=torch.device("cpu")))  # type: ignore[arg-type]
    kept.limit(limit_tokens * TOKEN_BYTES)
    ended: list[list[int]] = []
    """Texts that the limit leaves, the last used one last: a plain model of the books."""
    for prompt, num_new, is_cancelled in turns:
        text = kept.begin(prompt)
        shared = [len(os.path.commonprefix([one, prompt[:-1]])) for one in ended]
        longest = max(shared, default=0)
        assert text.num_reused == (longest if longest >= MIN_TOKENS else 0)
        assert held(text) == prompt[: text.num_reused]
        if text.num_reused:
            used = max(index for index, length in enumerate(shared) if length == longest)
            ended.append(ended.pop(used))
        if is_cancelled:  # before its first forward pass
            kept.end(text)
            continue
        whole = prompt + [3] * (num_new - 1)
        compute(text, whole, len(prompt))
        kept.end(text)
        if len(whole) >= MIN_TOKENS:
            ended = [one for one in ended if one != whole[: len(one)]]
            if len(whole) <= limit_tokens:
                ended.append(whole)
                while sum(map(len, ended)) > limit_tokens:
                    del ended[0]
        assert kept.num_bytes == sum(map(len, ended)) * TOKEN_BYTES <= limit_tokens * TOKEN_BYTES
        assert kept.num_texts == len(ended)
    kept.limit(-1)
    assert kept.num_bytes == kept.num_texts == 0


def test_limit__takes_states_of_running_texts_too() -> None:
    model, kept = model_and_cache("qwen3_next")
    first = go_on(kept, model, PROMPT, 12, reused=0)
    text = kept.begin(answer(first) + QUESTION)
    before = kept.num_bytes
    assert 0 < text.num_bytes < before
    kept.limit(before - 1)
    assert (kept.num_texts, kept.num_bytes) == (0, text.num_bytes)
    kept.limit(0)
    assert kept.num_bytes == 0


def test_memory__that_gets_short_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = model_and_cache("qwen2_moe", shares_memory=True)
    go_on(kept, model, PROMPT, 12, reused=0)
    assert kept.num_texts == 1
    monkeypatch.setattr("runtime.generation.prefix_cache.measure_free_memory", lambda _: [0])
    kept.limit(None)
    assert kept.num_texts == 0
