"""Most bytes of text that one token can stand for, where a tokenizer's parts prove a bound."""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"})
"""Parts that cut a text and drop nothing of it, except `Split` where it is configured to."""
NFC_SHRINKAGE = 3
"""NFC leaves at least this part of a text's bytes (the Kelvin sign, three bytes, becomes K)."""
SPACE_MARK = "\u2581"
"""Stands for a space in sentencepiece's vocabularies."""
BYTE_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def max_token_bytes(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the most bytes of UTF-8 that one token can stand for; None where that is unknown.

    It is known for BPE with a token for each byte, if nothing before it drops or joins characters.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ != "BPE" or backend.truncation:
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return None  # such a token takes any number of spaces
    pre_tokenizers = list_parts(backend.pre_tokenizer)
    kinds = {part["type"] for part in pre_tokenizers}
    drops_text = any(part.get("behavior") == "Removed" for part in pre_tokenizers)
    normalizers = list_parts(backend.normalizer)
    if drops_text or not kinds <= KEEPING_PRE_TOKENIZERS or not all(map(keeps_text, normalizers)):
        return None
    vocabulary = tokenizer.get_vocab()
    if "ByteLevel" in kinds:
        has_all_bytes = vocabulary.keys() >= set(ByteLevel.alphabet())
    else:
        has_all_bytes = backend.model.byte_fallback and vocabulary.keys() >= BYTE_NAMES
    if not has_all_bytes:
        return None
    shrinkage = NFC_SHRINKAGE if any(part["type"] == "NFC" for part in normalizers) else 1
    return shrinkage * max(len(token.encode()) for token in vocabulary)


def keeps_text(normalizer: dict[str, Any]) -> bool:
    """Whether it shortens no text, or by `NFC_SHRINKAGE` at most."""
    if normalizer["type"] == "Replace":
        return (normalizer["pattern"], normalizer["content"]) == ({"String": " "}, SPACE_MARK)
    return normalizer["type"] in ("NFC", "Prepend", "Sequence")


def list_parts(component: Any) -> list[dict[str, Any]]:
    """Return the settings of a pre-tokenizer or normalizer, and of the parts of a sequence."""

    def walk(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield settings
        for part in settings.get("pretokenizers") or settings.get("normalizers") or ():
            yield from walk(part)

    return [] if component is None else list(walk(json.loads(component.__getstate__())))
