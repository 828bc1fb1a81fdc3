"""The command line of this process: to continue after an interruption, and without secrets.

Secrets must not be in anything that a command writes: records, results, error lines. They are the
values of options that are declared so, and user names and passwords in addresses
(`https://USER:PASSWORD@HOST`).
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HIDDEN = "(hidden)"
"""Written in place of secrets."""
SHORTEST = 6
"""Characters of a secret that is removed wherever it occurs; a shorter one would also be found in
other words, and is removed with its option only."""
LOGIN = re.compile(r"(?<=://)[^/\s'\"?#]+(?=@)")
"""User name and password of an address."""
ADDRESS_LOGIN = re.compile(rf"(?:^|[,\[]\s*)[\"']?[a-z][\w+.-]*://{LOGIN.pattern}", re.IGNORECASE)
"""The same where a value, or a part of a list, is an address: not in a text that contains one."""


@dataclass(kw_only=True)
class Invocation:
    called: str
    """The program as the user called it, such as `moecast` or `python -m runtime`."""
    argv: Sequence[str]
    """Its arguments."""
    resumes: bool = False
    """Whether the same command continues where it was interrupted."""
    run_dir: Path | None = None
    """The folder of the run, if the arguments do not name it."""
    secret_names: Sequence[str] | None = None
    """Options whose values must not be shown; None before the command is known."""
    secrets: set[str] = field(default_factory=set, repr=False)
    """Texts that must not be written in any place."""

    def protect(self, names: Sequence[str]) -> None:
        """Hides the values of these options from now on."""
        self.secret_names = names
        pairs = zip(self.argv, [*self.argv[1:], ""], strict=True)
        options = [(split_name(option), following) for option, following in pairs]
        self.add_secrets(
            (name, value if equals else following) for (name, equals, value), following in options
        )
        # A bare value may be an address.
        self.add_secrets(("", argument) for argument in self.argv)

    def add_secrets(self, options: Iterable[tuple[str, Any]]) -> None:
        """Hides what is secret in options and their values from now on."""
        self.secrets.update(find_secrets(options, self.secret_names or ()))

    def hide(self, value: Any) -> Any:
        """Returns a text, or a tree of plain values, without the secrets that are known."""
        return hide(value, self.secrets)

    def hide_options(self, argv: Sequence[str]) -> list[str]:
        """Returns arguments without secrets."""
        return self.hide(hide_options(argv, self.secret_names or ()))

    def clean_line(self, line: str) -> str:
        """Returns a line for the terminal: without secrets, and without any address's login."""
        return hide_logins(self.hide(line))

    def explain_interruption(self) -> str:
        """Returns the line after Ctrl-C, with the command that continues or starts again."""
        if self.secret_names is None:
            return "interrupted before it began; run the same command again"
        words = [shlex.join(self.hide_options(self.argv))]
        if self.resumes and self.run_dir is not None:
            words.append(shlex.quote(f"run_dir={self.run_dir}"))
        purpose = "to continue" if self.resumes else "to run it again"
        return f"interrupted; {purpose}: {' '.join([self.called, *words]).strip()}"


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
