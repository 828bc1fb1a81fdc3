"""Text comes in whole characters, concatenates to the whole, and ends before a stop string."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from runtime.config import BUILTIN_MODELS
from runtime.generation import detokenizer
from runtime.serving.served_model import make_thread_safe
from tests.builders.plain_answers import TOKENIZER, text_of
from tests.builders.tokenizers import byte_fallback_tokenizer

BYTES = {
    byte: TOKENIZER.convert_tokens_to_ids(character)
    for character, byte in detokenizer.byte_level_alphabet().items()
}


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
def test_characters__come_with_their_last_byte(text: str) -> None:
    detokeniser, expected = detokenizer.Detokenizer(TOKENIZER), []
    for character in text:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert [detokeniser.push(BYTES[byte]) for byte in text.encode()] == expected
    assert detokeniser.end() == ""


BYTES_OF_CHARACTERS = [list(character.encode()) for character in "aé€😀\ufffd"]
LONE_BYTES = [[byte] for byte in (*"é€😀 ".encode(), 0xC3, 0xFF, 0xF0, 0x80, 0xE2, 0xED, 0xA0)]


def tokens_of(parts: list[list[int]]) -> list[list[int]]:
    return [[BYTES[byte] for byte in part] for part in parts]


ONE_TOKEN = st.integers(0, len(TOKENIZER) - 1).map(lambda token: [token])
ANY_TOKENS = st.sampled_from(tokens_of(BYTES_OF_CHARACTERS + LONE_BYTES)) | ONE_TOKEN


@given(st.lists(ANY_TOKENS, max_size=40))
@example(tokens_of([*BYTES_OF_CHARACTERS[3:], *BYTES_OF_CHARACTERS[4:], [0xFF]]))
def test_bytes_of_any_kind__concatenate_to_the_decoded_text(parts: list[list[int]]) -> None:
    """They stand among tokens of whole characters, too."""
    tokens = [token for part in parts for token in part]
    detokeniser = detokenizer.Detokenizer(TOKENIZER)
    text = "".join([*map(detokeniser.push, tokens), detokeniser.end()])
    assert (text, detokeniser.num_characters) == (text_of(tokens), len(text))


LLAMA, GEMMA = byte_fallback_tokenizer(), byte_fallback_tokenizer(strips=False)


@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("skips", [True, False])
@given(data=st.data())
def test_byte_fallback__pieces_concatenate_to_the_decoded_text(tokenizer, skips, data) -> None:
    others = st.integers(256, len(tokenizer) + 1).map(lambda token: [token])
    parts = st.one_of(st.sampled_from(BYTES_OF_CHARACTERS), others, st.sampled_from(LONE_BYTES))
    tokens = [token for part in data.draw(st.lists(parts, max_size=40)) for token in part]
    special_ids = () if skips else tokenizer.all_special_ids
    detokeniser = detokenizer.Detokenizer(tokenizer, shown_ids=special_ids)
    shown = ""
    for number, token in enumerate(tokens):
        shown += detokeniser.push(token)
        so_far = tokenizer.decode(tokens[: number + 1], skip_special_tokens=skips)
        held = detokeniser.held_text
        assert not held or shown + held == so_far
    shown += detokeniser.end()
    assert shown == tokenizer.decode(tokens, skip_special_tokens=skips)
    assert detokeniser.num_characters == len(shown)


def test_byte_fallback__holds_a_run_only_while_it_may_be_valid() -> None:
    detokeniser = detokenizer.Detokenizer(LLAMA)
    assert [detokeniser.push(byte) for byte in "é€".encode()] == [""] * 5
    assert (detokeniser.held_text, detokeniser.push(257)) == ("é€", "é€a")
    pieces = ["", "", "\ufffd" * 3, "\ufffd", "\ufffd"]
    assert [detokeniser.push(byte) for byte in b"a\xc3\xc3b\x80"] == pieces
    assert (detokeniser.held_text, detokeniser.push(258)) == ("", " b")
    assert [detokeniser.push(byte) for byte in b"\xe2\x82"] == ["", ""]
    assert (detokeniser.held_text, detokeniser.end()) == ("", "\ufffd\ufffd")


LONG = [
    *((TOKENIZER, tokens_of([data])[0]) for data in (b"\x80", b"\xf0", b"\xe2\x82\xac\xe2")),
    (TOKENIZER, [len(TOKENIZER) + 7]),  # a token without text
    *((LLAMA, part) for part in ([0xFF], [0x80, 257], [*"€".encode(), 258], [261], [261, 260])),
]


@pytest.mark.parametrize(("tokenizer", "part"), LONG)
def test_pieces__take_no_longer_the_more_there_is(tokenizer, part) -> None:
    """Whether their bytes are no character, or a run, or nothing."""
    tokens, lengths, decode = part * 500, [], tokenizer.decode

    def counted(decoded, **options):
        lengths.append(len(decoded))
        return decode(decoded, **options)

    with patch.object(tokenizer, "decode", counted):
        detokeniser = detokenizer.Detokenizer(tokenizer)
        shown, held = "".join(map(detokeniser.push, tokens)), detokeniser.end()
    assert shown + held == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(held) <= detokenizer.MAX_HELD_TOKENS
    assert max(lengths, default=0) <= 2 * detokenizer.CONTEXT_TOKENS


def test_names_of_bytes_without_a_decoder_of_runs__are_decoded_as_they_are() -> None:
    names = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    tokenizer = Tokenizer(models.BPE(names, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert detokenizer.find_byte_tokens(plain) is None
    assert detokenizer.Detokenizer(plain).push(0xC3) == "<0xC3>"
    assert detokenizer.find_byte_tokens(TOKENIZER) is None


def reference(text: str, stops: list[str], *, least: int) -> str:
    """Character by character: before the first stop string that is whole, the longest of those."""
    for end in range(least + 1, len(text) + 1):
        if starts := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: min(starts)]
    return text


PIECES = st.lists(st.text("ab", max_size=12), max_size=4)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@given(PIECES, PIECES, STOPS)
def test_stop_strings__count_from_a_piece_on(early, late, stops) -> None:
    """Those that end in an early piece do not; one that begins there and ends later does.

    No more is held back than could become one.
    """
    held = detokenizer.StopStringMatcher(stops)
    text = "".join(early + late)
    shown = "".join(held.push(piece, may_end=False) for piece in early)
    shown += "".join(held.push(piece) for piece in late)
    rest = text[len(shown) :]
    assert held.is_hit or not rest or any(stop.startswith(rest) for stop in stops)
    assert shown + held.end() == reference(text, stops, least=len("".join(early)))


WRITTEN = [("€", "bytes:\\xe2"), ("é", "bytes:\\xc3"), ("a", "a"), (" ", " ")]


@pytest.mark.parametrize(("text", "written"), WRITTEN)
def test_vocabulary__writes_a_byte_that_is_no_character_as_openai_does(text, written) -> None:
    vocabulary = detokenizer.Vocabulary(TOKENIZER)
    first = text.encode()[0]
    assert (vocabulary.text(BYTES[first]), vocabulary.bytes(BYTES[first])) == (written, [first])


def test_tokenizer__is_used_by_threads_at_once() -> None:
    """Encoding that changes padding or truncation while another thread decodes fails."""
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS / "qwen2_moe_tiny")
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    tokenizer = make_thread_safe(tokenizer)
    tokens = tokenizer("the heart pumps blood " * 50)["input_ids"]

    def work(encode: bool) -> None:
        for _ in range(200):
            if encode:
                assert tokenizer("the heart pumps blood " * 50)["input_ids"] == tokens
            else:
                tokenizer.decode(tokens, skip_special_tokens=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [True, False, True, False]))
