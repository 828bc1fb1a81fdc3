"""Text comes in whole characters, concatenates to the whole, and ends before a stop string."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from runtime.config import BUILTIN_MODELS
from runtime.generation.detokenizer import (
    CONTEXT_TOKENS,
    MAX_HELD_TOKENS,
    Detokenizer,
    StopStringMatcher,
    Vocabulary,
    byte_level_alphabet,
)
from runtime.serving.model_info import make_thread_safe

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_MODELS / "qwen2_moe_tiny")
BYTES = {
    byte: TOKENIZER.convert_tokens_to_ids(character)
    for character, byte in byte_level_alphabet().items()
}


def whole(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_pieces__concatenate_to_the_decoded_text(tokens: list[int]) -> None:
    detokeniser = Detokenizer(TOKENIZER)
    text = "".join([*map(detokeniser.push, tokens), detokeniser.end()])
    assert text == whole(tokens)
    assert detokeniser.num_characters == len(text)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
def test_characters__come_with_their_last_byte(text: str) -> None:
    detokeniser = Detokenizer(TOKENIZER)
    expected = []
    for character in text:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert [detokeniser.push(BYTES[byte]) for byte in text.encode()] == expected
    assert detokeniser.end() == ""


@given(st.lists(st.sampled_from([*"aé€😀".encode(), 0xC3, 0xFF, 0xF0, 0x80, 0xE2]), max_size=60))
def test_bytes_of_any_kind__concatenate_to_the_decoded_text(data: list[int]) -> None:
    tokens = [BYTES[byte] for byte in data]
    detokeniser = Detokenizer(TOKENIZER)
    pieces = [detokeniser.push(token) for token in tokens]
    assert "".join([*pieces, detokeniser.end()]) == whole(tokens)
    assert detokeniser.num_characters == len(whole(tokens))


class CountingTokenizer:
    """A tokenizer that keeps the longest list it was asked to decode."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self.longest = tokenizer, 0
        self.all_special_ids = tokenizer.all_special_ids

    def decode(self, tokens: list[int], **options: bool) -> str:
        self.longest = max(self.longest, len(tokens))
        return str(self._tokenizer.decode(tokens, **options))


@pytest.mark.parametrize("data", [b"\x80", b"\xf0", b"\xe2\x82\xac\xe2"])
def test_bytes_that_are_no_character__take_no_longer_the_more_they_are(data: bytes) -> None:
    counting = CountingTokenizer(TOKENIZER)
    detokeniser = Detokenizer(counting)  # type: ignore[arg-type]
    tokens = [BYTES[byte] for byte in data * 500]
    shown = "".join(map(detokeniser.push, tokens))
    assert counting.longest <= 2 * CONTEXT_TOKENS
    text = whole(tokens)
    assert text.startswith(shown)
    assert len(text) - len(shown) <= MAX_HELD_TOKENS


def byte_fallback_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer as Llama's: letters, and every byte as `<0xNN>`."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "a": 257}
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_byte_fallback__characters_and_lone_bytes_are_decoded() -> None:
    tokenizer = byte_fallback_tokenizer()
    for data in ("€😀a€".encode(), b"\xff" * 40 + b"a" + "€".encode(), b"a\xe2\x82"):
        tokens = [257 if byte == ord("a") else byte for byte in data]
        counting = CountingTokenizer(tokenizer)
        detokeniser = Detokenizer(counting)  # type: ignore[arg-type]
        text = "".join([*map(detokeniser.push, tokens), detokeniser.end()])
        assert text == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert counting.longest <= 2 * CONTEXT_TOKENS


def test_bytes_that_are_no_character__come_at_the_end_only() -> None:
    detokeniser = Detokenizer(TOKENIZER)
    assert [detokeniser.push(BYTES[byte]) for byte in "a€".encode()[:3]] == ["a", "", ""]
    assert detokeniser.end() == "\ufffd"


def reference(text: str, stops: list[str]) -> str:
    """Character by character: before the first stop string that is whole, the longest of those."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


LETTERS = st.text("ab", max_size=12)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_stop_strings__end_the_text_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    held = StopStringMatcher(stops)
    shown = [held.push(piece) for piece in pieces]
    is_hit = held.is_hit
    shown.append(held.end())
    text = "".join(pieces)
    assert "".join(shown) == reference(text, stops)
    assert is_hit == any(stop in text for stop in stops)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_stop_strings__hold_back_no_more_than_could_become_one(text: str, stops: list[str]) -> None:
    held = StopStringMatcher(stops)
    shown = "".join(held.push(character) for character in text)
    if not held.is_hit:
        rest = text[len(shown) :]
        assert any(stop.startswith(rest) for stop in stops) or not rest


@pytest.mark.parametrize(
    ("text", "written"), [("€", "bytes:\\xe2"), ("é", "bytes:\\xc3"), ("a", "a"), (" ", " ")]
)
def test_vocabulary__writes_a_byte_that_is_no_character_as_openai_does(
    text: str, written: str
) -> None:
    vocabulary = Vocabulary(TOKENIZER)
    first = text.encode()[0]
    assert vocabulary.text(BYTES[first]) == written
    assert vocabulary.bytes(BYTES[first]) == [first]


def test_vocabulary__gives_the_bytes_of_every_token() -> None:
    vocabulary = Vocabulary(TOKENIZER)
    tokens = TOKENIZER("Zwölf Boxkämpfer — ж")["input_ids"]
    assert bytes(byte for token in tokens for byte in vocabulary.bytes(token)).decode() == (
        "Zwölf Boxkämpfer — ж"
    )


def test_tokenizer__is_used_by_threads_at_once() -> None:
    """Encoding that changes padding or truncation while another thread decodes fails."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        BUILTIN_MODELS / "qwen2_moe_tiny"
    )
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    tokenizer = make_thread_safe(tokenizer)
    errors: list[Exception] = []
    tokens = tokenizer("the heart pumps blood " * 50)["input_ids"]

    def work(encode: bool) -> None:
        try:
            for _ in range(200):
                if encode:
                    assert tokenizer("the heart pumps blood " * 50)["input_ids"] == tokens
                else:
                    tokenizer.decode(tokens, skip_special_tokens=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number % 2 == 0]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
