"""Incremental detokenization in complete characters, and stop strings across tokens."""

import re
from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoders write it for bytes that are not, or not yet, a character."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte that is no character, as sentencepiece writes it."""


MAX_HELD_TOKENS = 4
"""Tokens that may lack the rest of a character, which has at most four bytes in UTF-8."""
MAX_UNDECIDED = 3
"""Replacement characters at the end of a text that later bytes may still turn into a character."""
CONTEXT_TOKENS = 2 * MAX_HELD_TOKENS
"""Tokens that are decoded again for each byte that is no character."""


class Detokenizer:
    """Turns tokens into pieces of text whose concatenation is the decoded whole.

    A character whose bytes are spread over several tokens is returned with the last of them. Bytes
    that never become a character are held back until that is certain, four tokens at most, so that
    each token takes the same time whatever came before it.

    A token's text depends on its neighbours (a space before it, bytes after it): each call decodes
    from the tokens of the last piece on, and returns only what is new after these.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        self._tokens: list[int] = []
        """Tokens from the beginning of the last returned piece on."""
        self._num_returned = 0
        """How many of these have been returned as text."""
        self._returned = ""
        """The text of these tokens that has been returned."""
        self.num_characters = 0
        """Characters returned so far."""

    def push(self, token: int) -> str:
        """Add a token and return the text that is complete now, often none."""
        if token in self._skipped:
            return ""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            if len(text) <= len(self._returned):
                return ""
            piece = self._take(text)
            self._tokens = self._tokens[self._num_returned :]
            self._num_returned = len(self._tokens)
            self._returned = self._decode(self._tokens)
            return piece
        if len(self._tokens) - self._num_returned <= MAX_HELD_TOKENS:
            return ""
        return self._settle(text)

    def end(self) -> str:
        """Return the rest: bytes that never became a character."""
        text = self._decode(self._tokens)
        self._num_returned = len(self._tokens)
        piece, self._returned = self._take(text), text
        return piece

    def _settle(self, text: str) -> str:
        """Return what later tokens cannot change of a text that ends in incomplete characters."""
        if not text.startswith(self._returned):
            # Some decoders give up a whole run of bytes, with characters that were returned before.
            self._tokens = self._tokens[self._num_returned :]
            self._returned = ""
            text = self._decode(self._tokens)
        num_undecided = min(MAX_UNDECIDED, len(text) - len(text.rstrip(REPLACEMENT)))
        piece = self._take(text[: len(text) - num_undecided])
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
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class StopStringMatcher:
    """Ends the text before the first stop string and holds back text that may become one.

    The first is the one that ends first, and the longest of those: the result does not depend on
    how the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._held = ""
        self.is_hit = False

    def push(self, piece: str) -> str:
        """Add text and return what can no longer become a stop string; nothing after a match."""
        if self.is_hit:
            return ""
        text = self._held + piece
        ends = [
            (start + len(string), start)
            for string in self._strings
            if (start := text.find(string)) >= 0
        ]
        if ends:
            self.is_hit = True
            self._held = ""
            return text[: min(ends)[1]]
        keep = max((longest_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

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
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Byte of each character of byte-level BPE.

    Printable Latin-1 stands for itself, the other bytes are written from U+0100 on (GPT-2's
    encoder).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}
