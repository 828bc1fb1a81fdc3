"""The command line of this process: to continue after an interruption, and for the record."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


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
    secrets: Sequence[str] = field(default_factory=list)
    """Options whose values must not be shown."""

    def explain_interruption(self) -> str:
        """Returns the line after Ctrl-C, with the command that continues or starts again."""
        words = [shlex.join(hide_secrets(self.argv, self.secrets))]
        if self.resumes and self.run_dir is not None:
            words.append(shlex.quote(f"run_dir={self.run_dir}"))
        purpose = "to continue" if self.resumes else "to run it again"
        return f"interrupted; {purpose}: {' '.join([self.called, *words]).strip()}"


def hide_secrets(argv: Sequence[str], secrets: Sequence[str]) -> list[str]:
    """Returns the arguments without the values of secret options, in both forms of an option."""
    shown, follows = [], False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        is_secret = name.removeprefix("--").replace("-", "_") in secrets
        shown.append(
            HIDDEN if follows else f"{name}={HIDDEN}" if is_secret and equals else argument
        )
        follows = is_secret and not equals and name.startswith("--")
    return shown


HIDDEN = "(hidden)"
"""Written in place of secrets."""
