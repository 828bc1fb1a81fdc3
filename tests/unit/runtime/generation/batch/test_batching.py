"""Batches of like lengths, padded where the model expects it."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.generation.batch import prompts
from runtime.hf.tokens import pad_batch

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=40)


def prompts_of(lengths):
    return [prompts.BatchPrompt(i, (5,) * n, most) for i, (n, most) in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 9))
def test_in_batches__each_prompt_once_longest_first_in_full_batches(lengths, size):
    asked = prompts_of(lengths)
    batches = prompts.make_batches(asked, size)
    assert sorted(one.id for batch in batches for one in batch) == list(range(len(asked)))
    in_order = [len(one.tokens) for batch in batches for one in batch]
    assert in_order == sorted(in_order, reverse=True)
    assert all(len(batch) == size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= size


@given(LENGTHS)
def test_padding_share__is_what_padding_adds(lengths):
    batches = prompts.make_batches(prompts_of(lengths), 4)
    masks = [pad_batch([one.tokens for one in batch], 0)[1] for batch in batches]
    computed = sum(mask.numel() for mask in masks)
    share = 1 - sum(int(mask.sum()) for mask in masks) / computed
    assert abs(prompts.padding_share(batches) - share) < 1e-9


def test_max_cache_length__is_the_width_when_the_last_row_ends():
    assert prompts.max_cache_length(tuple(prompts_of([(3, 1), (1, 6)]))) == 3 + 6
