"""Removes secrets from everything that a command writes: records, results, error lines.

Secrets are the values of options that are declared so, and user names and passwords in addresses
(`https://USER:PASSWORD@HOST`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from configs.schema import load_schemas
from predictors.config import SECRET

HIDDEN = "(hidden)"
"""Written in place of secrets."""
SHORTEST = 6
"""Characters of a secret that is removed wherever it occurs; a shorter one would also be found in
other words, and is removed with its option only."""
LOGIN = re.compile(r"(?<=://)[^/\s'\"?#]+(?=@)")
"""User name and password of an address."""
ADDRESS_LOGIN = re.compile(rf"(?:^|[,\[]\s*)[\"']?[a-z][\w+.-]*://{LOGIN.pattern}", re.IGNORECASE)
"""The same where a value, or a part of a list, is an address: not in a text that contains one."""


def secret_names(root: str) -> list[str]:
    """Returns the options of a root configuration whose values must not be written."""
    return [field.name for field in fields(load_schemas(root)[root]) if SECRET in field.metadata]


def find_secrets(options: Iterable[tuple[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """Yields the secrets in options and their values that must not be written anywhere."""
    for name, value in options:
        if not isinstance(value, str | Path):
            continue
        value = str(value)
        if name in names and len(value) >= SHORTEST:
            yield value
        for address in ADDRESS_LOGIN.finditer(value):
            yield f"{address[0].partition('://')[2]}@"


def hide(value: Any, secrets: Iterable[str]) -> Any:
    """Returns a text, or a tree of plain values, without secrets."""
    # A secret may contain another.
    ordered = sorted(secrets, key=len, reverse=True)
    return _hide_each(value, ordered) if ordered else value


def _hide_each(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str | Path):
        value = str(value)
        for secret in secrets:
            value = value.replace(secret, HIDDEN + "@" * secret.endswith("@"))
        return value
    if isinstance(value, Mapping):
        return {_hide_each(key, secrets): _hide_each(part, secrets) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_hide_each(part, secrets) for part in value]
    return value


def hide_logins(line: str) -> str:
    """Returns a line without the user names and passwords of the addresses in it."""
    return LOGIN.sub(HIDDEN, line)


def split_name(argument: str) -> tuple[str, str, str]:
    """Returns an option's name without dashes and plus signs, its `=` and its value."""
    name, equals, value = argument.partition("=")
    return name.lstrip("-+").replace("-", "_"), equals, value


def hide_options(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the arguments without the values of secret options, in every form of an option."""
    shown, follows = [], False
    for argument in argv:
        name, equals, _ = split_name(argument)
        is_secret = name in names
        if follows:
            shown.append(HIDDEN)
        elif is_secret and equals:
            shown.append(f"{argument.partition('=')[0]}={HIDDEN}")
        else:
            shown.append(argument)
        follows = not follows and is_secret and not equals and argument.startswith("--")
    return shown
