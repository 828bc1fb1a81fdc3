"""Text from a model, made safe for a terminal."""

import unicodedata


def strip_control_characters(text: str) -> str:
    """Remove control characters, which could be terminal escape sequences."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
