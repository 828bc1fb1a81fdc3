"""Tokens that a grammar allows: their bytes, the end of the text, and drafts that are dropped."""

import llguidance
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from runtime.errors import GrammarError
from runtime.generation.constraint import (
    Constraint,
    GrammarMask,
    GrammarVocabulary,
    compile_grammar,
    token_bytes,
)
from tests.builders.plain_answers import TOKENIZER, ids
from tests.builders.tokenizers import byte_fallback_tokenizer

SIZE = 8200
"""A model has more tokens than its tokenizer."""
END = 0


def begin(regex: str) -> Constraint:
    special_ids = TOKENIZER.all_special_ids
    vocabulary = GrammarVocabulary(TOKENIZER, SIZE, special_ids=special_ids, end_ids=[END])
    lark = f'%llguidance {{"no_forcing": true}}\nstart: /{regex}/'
    return compile_grammar(llguidance.LLMatcher.grammar_from_lark(lark), vocabulary).begin()


def texts_allowed(constraint: Constraint, text: str) -> set[str]:
    allowed = constraint.allowed(ids(text))
    assert allowed.shape == (SIZE,)
    return {TOKENIZER.decode([token]) for token in allowed.nonzero()[:, 0].tolist()}


def test_bytes__of_byte_level_tokens_are_those_of_the_text() -> None:
    texts = token_bytes(TOKENIZER, SIZE)
    for text in ("The heart, é😀\n", '{"a": [1, 2]}'):
        assert b"".join(texts[token] for token in ids(text)) == text.encode()
    assert texts[len(TOKENIZER) :] == [b""] * (SIZE - len(TOKENIZER))


def test_bytes__of_sentencepiece_tokens_have_their_spaces() -> None:
    tokenizer = byte_fallback_tokenizer()
    texts = token_bytes(tokenizer, len(tokenizer))
    assert texts[:256] == [bytes([byte]) for byte in range(256)]
    names = tokenizer.convert_tokens_to_ids(["a", "\u2581b", "\u2581"])
    assert [texts[token] for token in names] == [b"a", b" b", b" "]


def test_other_tokenizers__are_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    with pytest.raises(GrammarError, match="does not show the bytes of its tokens"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=words), 2)


def test_allowed__are_the_tokens_with_which_the_text_may_go_on() -> None:
    constraint = begin("(yes|no)")
    assert texts_allowed(constraint, "ye") == {"s"}
    assert {"y", "n", "no"} <= texts_allowed(constraint, "") <= {"y", "ye", "yes", "n", "no"}
    # Nothing may follow "yes".
    assert constraint.allowed(ids("maybe")) is constraint.allowed(ids("yes")) is None
    assert texts_allowed(constraint, "n") == {"o"}


def test_answer__ends_where_nothing_may_follow() -> None:
    constraint = begin("a{3}")
    (token,) = ids("a")
    assert [constraint.push(token) for _ in range(3)] == [False, False, True]
    with pytest.raises(GrammarError, match="the grammar refuses token"):
        begin("a{3}").push(ids("b")[0])


def test_mask__allows_the_end_where_the_text_is_complete() -> None:
    constraint, scores = begin("(ab)*"), torch.randn(1, SIZE)
    for ends, expected in (({END}, [True, False, True]), (set(), [False] * 3)):
        mask = GrammarMask(constraint, end_ids=ends, num_prompt=2)
        for text, may_end in zip(("", "a", "ab"), expected, strict=True):
            masked = mask(torch.tensor([[5, 6, *ids(text)]]), scores)
            assert (masked[0, END] > -torch.inf) == may_end
            kept = masked > -torch.inf
            assert torch.equal(masked[kept], scores[kept])
        assert mask(torch.tensor([[5, 6, *ids("x")]]), scores) is scores


def test_end_that_min_tokens_forbids__comes_where_nothing_else_may() -> None:
    mask = GrammarMask(begin("a?"), end_ids={END}, num_prompt=0)
    masked = mask(torch.empty((1, 0), dtype=torch.long), torch.full((1, SIZE), -torch.inf))
    assert masked[0, END] == masked[0, ids("a")[0]] == 0
    assert int((masked > -torch.inf).sum()) == 2
