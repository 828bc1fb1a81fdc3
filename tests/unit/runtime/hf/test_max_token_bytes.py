"""A text never has fewer tokens than the longest token's bytes allow."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from runtime.hf.tokens import BYTE_NAMES, NFC_SHRINKAGE, max_token_bytes
from tests.builders.plain_answers import TOKENIZER

MARK = normalizers.Replace(" ", "\u2581")


def bpe(normalizer=None, pre_tokenizer=None, **more) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and of a few letters; NFC needs none to shorten what it reads."""
    names = [*sorted(BYTE_NAMES), *pre_tokenizers.ByteLevel.alphabet(), "<unk>", "aa", "\u2581"]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "a")], **{"byte_fallback": True, **more}))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


KNOWN = {
    "reference": TOKENIZER,
    "bytes": bpe(pre_tokenizer=pre_tokenizers.ByteLevel()),
    "bytes after nfc": bpe(normalizers.NFC(), pre_tokenizers.ByteLevel()),
    "fallback": bpe(),
    "sentencepiece": bpe(normalizers.Sequence([normalizers.Prepend("\u2581"), MARK])),
}
WIDE = st.text("a \u212a\u00e9\u0301\u0345\u1112\u1161\u11ab\U0001f600", max_size=30)


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=60, database=None, deadline=None)
@given(text=st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), WIDE))
def test_known_bound__holds_for_every_text(name, text):
    tokenizer = KNOWN[name]
    bound = max_token_bytes(tokenizer)
    assert bound is not None
    assert len(text.encode()) <= bound * len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_nfc__shortens_no_character_by_more():
    for code in (*range(0xD800), *range(0xE000, 0x30000)):
        composed = unicodedata.normalize("NFC", chr(code))
        decomposed = unicodedata.normalize("NFD", chr(code))
        assert len(chr(code).encode()) <= NFC_SHRINKAGE * len(composed.encode())
        assert len(decomposed.encode()) <= NFC_SHRINKAGE * len(composed.encode())


STRIPPING, CUTTING = bpe(), bpe()
STRIPPING.add_tokens([AddedToken("<end>", special=True, rstrip=True)], special_tokens=True)
CUTTING.backend_tokenizer.enable_truncation(4)
UNKNOWN = {
    "words": PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    ),
    "joined unknown characters": bpe(byte_fallback=False, unk_token="<unk>", fuse_unk=True),
    "removed spaces": bpe(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "removed pattern": bpe(pre_tokenizer=pre_tokenizers.Split(Regex(r"\s"), "removed")),
    "stripped": bpe(normalizers.Strip()),
    "replaced": bpe(normalizers.Replace(Regex(" +"), "\u2581")),
    "in a sequence": bpe(normalizers.Sequence([MARK, normalizers.NFKC()])),
    "a token that takes spaces": STRIPPING,
    "cut": CUTTING,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_tokenizers_that_drop_or_join_text__have_no_bound(name):
    assert max_token_bytes(UNKNOWN[name]) is None
