"""Tokens to text as they come: whole characters only, and nothing that a stop string may take."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts for bytes that are no character, or not yet."""


class Detokenizer:
    """Concatenated, its pieces are the decoded whole.

    A character whose bytes are spread over several tokens comes with the last of them.

    A token's text depends on its neighbours (a space before it, bytes after it): what is decoded
    each time begins at the tokens told last, and only what is new behind these is told.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._tokens: list[int] = []
        """From the beginning of the piece told last."""
        self._num_told = 0
        """Of these, how many were told."""
        self.num_characters = 0
        """Of all pieces so far."""

    def push(self, token: int) -> str:
        """The text that is whole now; often empty."""
        self._tokens.append(token)
        told, text = self._decoded()
        if len(text) <= len(told) or text.endswith(REPLACEMENT):
            return ""
        self._tokens = self._tokens[self._num_told :]
        self._num_told = len(self._tokens)
        return self._new(told, text)

    def end(self) -> str:
        """What is left: bytes that never became a character."""
        told, text = self._decoded()
        self._num_told = len(self._tokens)
        return self._new(told, text)

    def _new(self, told: str, text: str) -> str:
        piece = text[len(told) :]
        self.num_characters += len(piece)
        return piece

    def _decoded(self) -> tuple[str, str]:
        return self._text(self._tokens[: self._num_told]), self._text(self._tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(tokens),
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text


class StopStringMatcher:
    """Holds back what may become a stop string, and ends the text before the first that is whole.

    The first is the one that ends first, the longest of those: so it does not matter in which
    pieces the text comes.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._held = ""
        self.is_hit = False

    def push(self, piece: str) -> str:
        """The text that may be told now; nothing more once a stop string is whole."""
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
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def longest_overlap(text: str, string: str) -> int:
    """Length of the longest end of the text with which the string begins, without being whole."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
