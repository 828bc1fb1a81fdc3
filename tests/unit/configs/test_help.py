"""`--help`: the basic options with an example; `all` and one option on request."""

import shlex
from functools import partial

import pytest

from configs.arguments import read_arguments
from configs.cli import main
from configs.commands import PROGRAMS, Command
from configs.compose import compose_typed, declared_type
from configs.execution import import_named
from configs.help import write_command_help
from configs.program import run_program
from runtime.serving.config import ServeConfig

PAIRS = [(program, command) for program, commands in PROGRAMS.items() for command in commands]
COMMANDS = {f"{program} {command.name}".strip(): (program, command) for program, command in PAIRS}
SERVE = next(command for command in PROGRAMS["runtime"] if command.name == "serve")


@pytest.mark.parametrize(("program", "command"), COMMANDS.values(), ids=COMMANDS)
def test_page__is_short_and_its_example_composes(program: str, command: Command) -> None:
    argv, schema = shlex.split(command.example), import_named(command.config)
    arguments = read_arguments(argv, command.positional, find_type=partial(declared_type, schema))
    assert compose_typed(schema, arguments.options)[0]
    page = write_command_help(f"python -m {program}", command, schema)
    assert f"python -m {program} {command.name}".strip() in page
    assert len(command.basic) <= 12
    assert len(command.basic) == len(set(command.basic))


def test_page__begins_with_the_model_and_has_words() -> None:
    page = write_command_help("moecast", SERVE, ServeConfig)
    assert page.startswith("usage: moecast serve [MODEL] [key=value ...]\n")
    assert "\nexample:\n  moecast serve Qwen/Qwen3-30B-A3B model.local_only=false" in page
    positions = [page.index(f"\n  {key}  ") for key in SERVE.basic]
    assert positions == sorted(positions)
    assert "  budget  a size or a share" in page
    assert "  model.local_only  on/off = true\n      Use only files" in page
    assert "  port  number = 8000\n" in page
    assert "store.path" not in page
    assert "debug" not in page


def test_all__lists_every_option() -> None:
    page = write_command_help("moecast", SERVE, ServeConfig, "all")
    for text in ("store.path  path", "system.eviction  text", "debug  on/off", "--config FILE"):
        assert text in page
    assert page.index("  model  ") < page.index("  budget  ") < page.index("  system  ")


def test_topic__is_a_group_or_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("runtime", [SERVE], ["serve", "--help", "max-running"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "  max_running  number = 8"
    assert main("runtime", [SERVE], ["help", "serve"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m runtime serve")
    assert "system.eviction" in write_command_help("moecast", SERVE, ServeConfig, "system")
    assert main("runtime", [SERVE], ["serve", "--help", "max_runing"]) == 2
    assert "Did you mean 'max_running'" in capsys.readouterr().err


def test_program_with_a_default_command__shows_the_others(capsys) -> None:
    assert run_program("train", ["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m train [MODEL]")
    assert "\n  reuse  Trains the predictor of reuse" in out


@pytest.mark.parametrize("word", ["reusse", "reuze"])
def test_misspelt_command__is_no_model(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program("train", [word]) == 2
    assert f"unknown command {word!r}. Did you mean" in capsys.readouterr().err
