"""Single tokens as text and as bytes, for log-probabilities."""

import re
from functools import cache, cached_property

from transformers import PreTrainedTokenizerBase

from runtime.generation.detokenizer import REPLACEMENT

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""How sentencepiece writes a byte that is no character."""


class Vocabulary:
    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        r"""The token alone; bytes that are no character as OpenAI writes them, `bytes:\\xe2`."""
        text = self._decoded(token)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))

    def bytes(self, token: int) -> list[int]:
        """UTF-8 of the token alone; several tokens' may make up one character."""
        text = self._decoded(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if byte := BYTE_PIECE.fullmatch(piece):
            return [int(byte[1], 16)]
        table = self._byte_of_character
        if all(character in table for character in piece):
            return [table[character] for character in piece]
        return list(text.encode())

    def _decoded(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    @cached_property
    def _byte_of_character(self) -> dict[str, int]:
        return bytes_of_characters()


@cache
def bytes_of_characters() -> dict[str, int]:
    """How byte-level BPE writes bytes: printable Latin-1 as itself, the others from U+0100 on
    (GPT-2's encoder).
    """
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in own]
    table = {chr(byte): byte for byte in own}
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}
