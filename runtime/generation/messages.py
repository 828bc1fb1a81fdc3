"""Texts of messages in files of prompts and data sets."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from runtime.errors import PromptFileError

TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
"""Kinds of parts with a text, in OpenAI's two APIs."""


def content_text(content: Any, skipped: Counter[str]) -> str:
    """Return the text of a message's content: of a string, of parts, or of null, which has none.

    Args:
        skipped: counts the parts that are no text (images, audio) by their kind.

    Raises:
        PromptFileError: it is something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list):
        raise PromptFileError(f"a {type(content).__name__} is neither a text nor a list of parts")
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and kind in (*TEXT_PARTS, "str"):
            texts.append(text)
        else:
            skipped[str(kind)] += 1
    return "".join(texts)


def check_encodable(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can spell, but which is no character."""
    text.encode()  # UnicodeEncodeError is a ValueError
    return text


def describe_skipped(skipped: Counter[str]) -> str:
    """Describe the parts that were left out, for a line of the log."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(skipped.items()))
    return f"{skipped.total()} parts of messages are no text and are left out ({kinds})"
