"""The line after Ctrl-C: the exact command, quoted for the shell, without secrets."""

from pathlib import Path

from configs.invocation import Invocation


def test_interruption__continues_in_the_folder_that_was_chosen() -> None:
    options = {"resumes": True, "run_dir": Path("runs/a b"), "secret_names": []}
    invocation = Invocation(called="python -m train", argv=["seed=1"], **options)
    line = "interrupted; to continue: python -m train seed=1 'run_dir=runs/a b'"
    assert invocation.explain_interruption() == line


def test_interruption__before_the_command_is_known_shows_no_argument() -> None:
    line = Invocation(called="moecast", argv=["serve", "api_key=secret"]).explain_interruption()
    assert line == "interrupted before it began; run the same command again"


def test_protect__a_command_without_arguments() -> None:
    """As of `python -m collect`, where every option has a default."""
    invocation = Invocation(called="python -m collect", argv=[])
    invocation.protect(["api_key"])
    assert not invocation.secrets
