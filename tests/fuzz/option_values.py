"""Options of commands: a line for each argument, the first line names the command."""

from functools import partial

from configs.arguments import read_arguments, read_option_file
from configs.commands import PROGRAMS
from configs.compose import compose_typed, declared_type, expand_sweep
from configs.execution import import_named
from predictors.errors import MoecastError
from tests.fuzz.named_file import write_input
from zoo.config import ListConfig

EVERY = [(program, command) for program, commands in PROGRAMS.items() for command in commands]
COMMANDS = {f"{program} {command.name}".strip(): command for program, command in EVERY}


def read_command_line(data: bytes) -> None:
    """Reads options as the command line of `python -m PROGRAM COMMAND` has them."""
    name, *argv = data.decode(errors="surrogateescape").split("\n")
    if name not in COMMANDS:
        raise MoecastError("no such command")
    command = COMMANDS[name]

    schema = import_named(command.config)
    # An argument cannot have a zero byte.
    argv = [argument.replace("\0", "") for argument in argv]
    arguments = read_arguments(argv, command.positional, find_type=partial(declared_type, schema))
    if arguments.help_topic is not None or arguments.files:
        return
    if arguments.is_sweep:
        expand_sweep(schema, arguments.options)
    else:
        compose_typed(schema, arguments.options)


def read_file(data: bytes) -> None:
    """Reads a YAML file of options of `moecast zoo list`."""
    path = write_input(data, "options.yaml")
    read_option_file(path)
    compose_typed(ListConfig, [], [path])
