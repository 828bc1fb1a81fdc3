"""The error of wrong options, and the messages for names that do not exist."""

from collections.abc import Iterable
from difflib import get_close_matches

from predictors.errors import MoecastError

LISTED = "--help lists the options"


class ConfigError(MoecastError):
    """An argument or a configuration file that does not match the command's schema."""


def unknown_option(key: str, known: Iterable[str]) -> str:
    """Returns the message for an option that does not exist, with the closest one."""
    options = sorted(known)
    nested = [option for option in options if option.endswith(f".{key}")]
    close = nested[:1] or get_close_matches(key, options, n=1, cutoff=0.7)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown option {key!r}.{hint} {LISTED}"


def not_an_option(argument: str) -> str:
    return f"{argument!r} is not an option: write key=value; {LISTED}"
