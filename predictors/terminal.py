"""Text from elsewhere, made safe for a terminal."""

import unicodedata

UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: controls, invisible formats such as changes of direction, lone surrogates,
line and paragraph separators."""


def escape_controls(text: str) -> str:
    """Replaces characters that would control the terminal by their escaped code points.

    Line ends and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if character not in "\n\t" and unicodedata.category(character) in UNSAFE
        else character
        for character in text
    )
