"""Faults of the user, told apart from faults of ours (which are `assert`)."""

import difflib
from collections.abc import Iterable


class MoecastError(ValueError):
    """The user's fault: the message names the cause and the next command; no traceback is due."""


class PredictorError(MoecastError):
    """A predictor that does not exist, or that was made for something else."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not in a table: the choices and the closest of them."""
    choices = sorted(known)
    if not choices:
        return f"unknown {kind} {name!r}: there is none yet"
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}.{hint} Choices: {', '.join(choices)}"
