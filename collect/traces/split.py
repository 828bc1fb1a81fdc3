"""Training and held-out requests, 9:1, told by the prompt's digest."""

import hashlib
from enum import StrEnum

HELD_OUT_OF = 10
"""One request in ten is held out."""


class Split(StrEnum):
    """Which requests a row may be used for. Never by token: neighbours would leak."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def prompt_digest(text: str) -> str:
    """sha256 of the prompt's text: the request's identity in every trace of every model."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def split_of(digest: str) -> Split:
    """The same prompt is on the same side in every trace, so that traces can be joined."""
    return Split.HELD_OUT if int(digest[:12], 16) % HELD_OUT_OF == 0 else Split.TRAIN
