"""Incremental detokenization in complete characters, and stop strings across tokens."""

import codecs
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoders write it for bytes that are not, or not yet, a character."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte that is no character, as sentencepiece writes it."""
VALID_BYTE, INVALID_BYTE = ord("a"), 0xFF

MAX_HELD_TOKENS = 4
"""Tokens that may lack the rest of a character, which has at most four bytes in UTF-8."""
MAX_UNDECIDED = 3
"""Replacement characters at the end of a text that later bytes may still turn into a character."""
CONTEXT_TOKENS = 2 * MAX_HELD_TOKENS
"""Tokens that are decoded again for each byte that is no character."""


@dataclass(frozen=True, kw_only=True)
class ByteTokens:
    """The tokens of single bytes, if the decoder treats a run of them as a whole.

    Llama's and Gemma's decoders write a run of bytes that is not UTF-8 as one replacement character
    for each of its bytes, those of valid characters included.
    """

    bytes: Mapping[int, int]
    """Byte of each token."""
    valid: int
    """Token of a byte that is a character."""
    invalid: int
    """Token of a byte that is part of no character."""


def find_byte_tokens(tokenizer: PreTrainedTokenizerBase) -> ByteTokens | None:
    """Return the tokenizer's tokens of bytes; None if it has none or decodes each for itself."""
    ids = {}
    # The invalid byte comes first: most tokenizers have no token for it, which ends the search.
    for byte in reversed(range(256)):
        name = f"<0x{byte:02X}>"
        token = tokenizer.convert_tokens_to_ids(name)
        if token is not None and tokenizer.convert_ids_to_tokens(token) == name:
            ids[byte] = token
        elif byte in (INVALID_BYTE, VALID_BYTE):
            return None
    valid, invalid = ids[VALID_BYTE], ids[INVALID_BYTE]
    if tokenizer.decode([valid, invalid]) != 2 * REPLACEMENT:
        return None
    tokens = {token: byte for byte, token in ids.items()}
    return ByteTokens(bytes=tokens, valid=valid, invalid=invalid)


def decode(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of tokens, special ones too."""
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class ByteRun:
    """Consecutive tokens of single bytes, while it is open whether they are characters."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_valid = True
        """Whether the bytes are UTF-8 so far; the last character may be incomplete."""
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def add(self, token: int, byte: int) -> None:
        self.tokens.append(token)
        try:
            self._text += self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self.is_valid = False

    @property
    def text(self) -> str:
        """The run's text if it ends here; empty while a character is incomplete."""
        is_complete = self.is_valid and not self._decoder.getstate()[0]
        return self._text if is_complete else ""


class Detokenizer:
    """Turns tokens into pieces of text whose concatenation is the decoded whole.

    A character whose bytes are spread over several tokens is returned with the last of them. Bytes
    that never become a character are held back until that is certain, four tokens at most, so that
    each token takes the same time whatever came before it. A run of `ByteTokens` is held back until
    another token ends it, or until it cannot be valid whatever follows.

    Of special tokens, only those in `shown_ids` are text.

    A token's text depends on its neighbours (a space before it, bytes after it): each call decodes
    from the tokens of the last piece on, and returns only what is new after these.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, shown_ids: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids).difference(shown_ids)
        self._byte_tokens = find_byte_tokens(tokenizer)
        self._run: ByteRun | None = None
        self._num_stripped = 0
        """Spaces at the beginning of the run that the decoder strips, as it begins the text."""
        self._tokens: list[int] = []
        """Tokens from the beginning of the last returned piece on, without the run's."""
        self._num_returned = 0
        """How many of these have been returned as text."""
        self._returned = ""
        """The text of these tokens that has been returned."""
        self.num_characters = 0
        """Characters returned so far."""

    @property
    def held_text(self) -> str:
        """Text of a run of bytes, which further bytes may still make invalid."""
        return "" if self._run is None else self._run.text[self._num_stripped :]

    def push(self, token: int) -> str:
        """Add a token and return the text that is complete now, often none."""
        if token in self._skipped or self._tokenizer.convert_ids_to_tokens(token) is None:
            return ""  # models have more tokens than their tokenizers, which decode leaves out
        if self._byte_tokens is not None:
            if token in self._byte_tokens.bytes:
                return self._push_byte(token, self._byte_tokens)
            if self._run is not None:
                return self._end_run(self._byte_tokens, token)
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if self._byte_tokens is not None or not text.endswith(REPLACEMENT):
            if len(text) <= len(self._returned):
                # Any number of tokens without a text may follow one another.
                del self._tokens[self._num_returned + CONTEXT_TOKENS :]
                return ""
            piece = self._take(text)
            self._start_after(self._tokens[self._num_returned :])
            return piece
        if len(self._tokens) - self._num_returned <= MAX_HELD_TOKENS:
            return ""
        return self._settle(text)

    def end(self) -> str:
        """Return the rest: a run of bytes, or bytes that never became a character."""
        if self._byte_tokens is not None and self._run is not None:
            return self._end_run(self._byte_tokens)
        text = self._decode(self._tokens)
        self._num_returned = len(self._tokens)
        piece, self._returned = self._take(text), text
        return piece

    def _push_byte(self, token: int, byte_tokens: ByteTokens) -> str:
        self._run = self._run or ByteRun()
        if not self._run.is_valid:
            self.num_characters += 1
            return REPLACEMENT
        self._run.add(token, byte_tokens.bytes[token])
        if self._run.is_valid:
            if not self._tokens and len(self._run.text) == 1:
                self._num_stripped = 1 - len(self._decode(self._run.tokens))
            return ""
        piece = self._take(self._decode(self._tokens + self._run.tokens))
        # However long the run becomes, one of its bytes stands for it in what is decoded.
        self._start_after([byte_tokens.invalid])
        return piece

    def _end_run(self, byte_tokens: ByteTokens, *tokens: int) -> str:
        """Return the text of the run, if it is open, and of the token that ends it."""
        assert self._run is not None
        is_valid, held, self._run = self._run.is_valid, self._run.tokens, None
        self._num_stripped = 0
        text = self._decode([*self._tokens, *(held if is_valid else ()), *tokens])
        piece = self._take(text)
        self._start_after([byte_tokens.valid if is_valid else byte_tokens.invalid, *tokens])
        return piece

    def _start_after(self, tokens: list[int]) -> None:
        """Take these tokens, whose text has been returned, as the context of the next ones."""
        self._tokens = tokens
        self._num_returned = len(tokens)
        self._returned = self._decode(tokens)

    def _settle(self, text: str) -> str:
        """Return what later tokens cannot change of a text that ends in incomplete characters."""
        num_replaced = len(text) - len(text.rstrip(REPLACEMENT))
        # Some of these may be characters that were returned: U+FFFD is one itself.
        num_decided = max(len(self._returned), len(text) - min(MAX_UNDECIDED, num_replaced))
        num_undecided = len(text) - num_decided
        piece = self._take(text[:num_decided])
        self._tokens = self._tokens[-CONTEXT_TOKENS:]
        self._num_returned = max(0, len(self._tokens) - MAX_HELD_TOKENS)
        text = self._decode(self._tokens)
        self._returned = text[: len(text) - num_undecided]
        return piece

    def _take(self, text: str) -> str:
        """Count and return the characters after those that were returned."""
        piece = text[len(self._returned) :]
        self.num_characters += len(piece)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return decode(tokens, self._tokenizer)


class StopStringMatcher:
    """Ends the text before the first stop string and holds back text that may become one.

    The first is the one that ends first, and the longest of those: the result does not depend on
    how the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def is_hit(self) -> bool:
        return self.found is not None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Add text and return what can no longer become a stop string; nothing after a match.

        Args:
            may_end: whether a stop string that ends in this piece counts.
        """
        if self.is_hit:
            return ""
        text = self._held + piece
        ends = [
            (start + len(string), start, string)
            for string in self._strings
            # One that ends in held-back text came before it counted.
            if may_end and (start := text.find(string, self._first_start(string))) >= 0
        ]
        if ends:
            _, start, self.found = min(ends)
            self._held = ""
            return text[:start]
        keep = max((longest_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_start(self, string: str) -> int:
        """Least position at which a stop string begins that ends after the held-back text."""
        return max(0, len(self._held) - len(string) + 1)

    def would_match(self, text: str) -> bool:
        """Whether a stop string would end with this text, which is not pushed yet."""
        whole = self._held + text
        return bool(text) and any(whole.endswith(string) for string in self._strings)

    def end(self) -> str:
        """Return the held-back text that did not become a stop string."""
        held, self._held = self._held, ""
        return held


def longest_overlap(text: str, string: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the string."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0


class Vocabulary:
    """Single tokens as text and as bytes, for log-probabilities."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        """Texts of the tokens so far: most likely tokens recur."""

    def text(self, token: int) -> str:
        r"""A token's text; bytes that are no character as OpenAI writes them, `bytes:\\xe2`."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._write(token)
        return text

    def _write(self, token: int) -> str:
        text = self._decode(token)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))

    def bytes(self, token: int) -> list[int]:
        """A token's UTF-8 bytes; a character may be spread over several tokens."""
        text = self._decode(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        spelling = str(self._tokenizer.convert_ids_to_tokens(token))
        if byte := BYTE_TOKEN.fullmatch(spelling):
            return [int(byte[1], 16)]
        table = byte_level_alphabet()
        if all(character in table for character in spelling):
            return [table[character] for character in spelling]
        return list(text.encode())

    def _decode(self, token: int) -> str:
        return decode([token], self._tokenizer)


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Byte of each character of byte-level BPE."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
