"""Errors that the user can correct; faults of moecast are `assert`."""

import difflib
from collections.abc import Iterable

MOST_LISTED = 15
"""Choices of a message that also names the closest one."""


class MoecastError(ValueError):
    """A fault of the user; the message names the cause and the next command, without traceback."""

    ends_process = False
    """The process ends without Python's own teardown, in which it might crash."""


class NegativeResult(Exception):
    """A check that the user asked for ends with "no": exit code 1, the message as it is."""


class DiskFullError(MoecastError):
    """The disk is full, or too full for what is to be written; nothing half-written is left."""


class PredictorError(MoecastError):
    """A predictor that does not exist, or was made for another model."""


class ConfigError(MoecastError):
    """An argument or a configuration file that does not match the command's schema."""


def describe_error(error: BaseException) -> str:
    """Returns type and message of any exception on one line; not all have a message."""
    message = " ".join(str(error).split())
    if not message and isinstance(error, MemoryError):
        message = "no memory is left, of the machine or within a limit (ulimit -v, a container)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def unknown_option(key: str, known: Iterable[str]) -> str:
    """Returns the message for an option that does not exist, with the closest one."""
    options = sorted(known)
    nested = [option for option in options if option.endswith(f".{key}")]
    close = nested[:1] or difflib.get_close_matches(key, options, n=1, cutoff=0.7)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown option {key!r}.{hint} --help lists the options"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns the message for an unknown name, with the closest one and the choices.

    A long list is left out if a name is close.
    """
    choices = sorted(known)
    if not choices:
        return f"unknown {kind} {name!r}: there are none"
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if close and len(choices) > MOST_LISTED:
        return f"unknown {kind} {name!r}.{hint}"
    return f"unknown {kind} {name!r}.{hint} Choices: {', '.join(choices)}"
