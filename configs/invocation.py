"""The command line of this process: to continue after an interruption, and without secrets.

Secrets must not be in anything that a command writes: records, results, error lines. They are the
values of options that are declared so, and user names and passwords in addresses
(`https://USER:PASSWORD@HOST`).
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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
        pairs = pairwise([*self.argv, ""])
        options = [(split_name(option), following) for option, following in pairs]
        self.add_secrets(
            (name, value if equals else following) for (name, equals, value), following in options
        )
        # A bare value may be an address.
        self.add_secrets(("", argument) for argument in self.argv)

    def add_secrets(self, options: Iterable[tuple[str, Any]]) -> None:
        """Hides what is secret in options and their values from now on."""
        for name, value in options:
            if not isinstance(value, str | Path):
                continue
            value = str(value)
            if name in (self.secret_names or ()) and len(value) >= SHORTEST:
                self.secrets.add(value)
            for address in ADDRESS_LOGIN.finditer(value):
                self.secrets.add(f"{address[0].partition('://')[2]}@")

    def hide(self, value: Any) -> Any:
        """Returns a text, or a tree of plain values, without the secrets that are known."""
        if not self.secrets:
            return value
        if isinstance(value, str | Path):
            value = str(value)
            # A secret may contain another.
            for secret in sorted(self.secrets, key=len, reverse=True):
                value = value.replace(secret, HIDDEN + "@" * secret.endswith("@"))
            return value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(part) for key, part in value.items()}
        return [self.hide(part) for part in value] if isinstance(value, list | tuple) else value

    def hide_options(self, argv: Sequence[str]) -> list[str]:
        """Returns arguments without secrets, in every form of an option."""
        shown, follows = [], False
        for argument in argv:
            name, equals, _ = split_name(argument)
            is_secret = name in (self.secret_names or ())
            if follows:
                shown.append(HIDDEN)
            elif is_secret and equals:
                shown.append(f"{argument.partition('=')[0]}={HIDDEN}")
            else:
                shown.append(argument)
            follows = not follows and is_secret and not equals and argument.startswith("--")
        return self.hide(shown)

    def clean_line(self, line: str) -> str:
        """Returns a line for the terminal: without secrets, and without any address's login."""
        return LOGIN.sub(HIDDEN, self.hide(line))

    def explain_interruption(self) -> str:
        """Returns the line after Ctrl-C, with the command that continues or starts again."""
        if self.secret_names is None:
            return "interrupted before it began; run the same command again"
        words = [shlex.join(self.hide_options(self.argv))]
        if self.resumes and self.run_dir is not None:
            words.append(shlex.quote(f"run_dir={self.run_dir}"))
        purpose = "to continue" if self.resumes else "to run it again"
        return f"interrupted; {purpose}: {' '.join([self.called, *words]).strip()}"


def split_name(argument: str) -> tuple[str, str, str]:
    """Returns an option's name without dashes and plus signs, its `=` and its value."""
    name, equals, value = argument.partition("=")
    return name.lstrip("-+").replace("-", "_"), equals, value
