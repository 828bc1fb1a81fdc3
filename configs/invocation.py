"""The command line of this process: to continue after an interruption, and for the record."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.secrets import find_secrets, hide, hide_logins, hide_options, split_name


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
