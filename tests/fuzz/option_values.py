"""Options of commands: a line for each argument, the first line names the command."""

from configs.arguments import read_arguments
from configs.commands import PROGRAMS
from configs.compose import compose_defaults, compose_typed, declared_type
from configs.options import read_option_file
from configs.sweep import expand_sweep
from predictors.errors import MoecastError
from tests.fuzz.named_file import write_input

COMMANDS = {
    f"{program} {command.name}".strip(): command
    for program, commands in PROGRAMS.items()
    for command in commands
}


def read_command_line(data: bytes) -> None:
    """Reads options as the command line of `python -m PROGRAM COMMAND` has them."""
    name, *argv = data.decode(errors="surrogateescape").split("\n")
    if name not in COMMANDS:
        raise MoecastError("no such command")
    command = COMMANDS[name]

    def find_type(key: str) -> object:
        config, groups = compose_defaults(command.config)
        return declared_type(config, key, groups)

    # An argument cannot have a zero byte.
    arguments = read_arguments(
        [argument.replace("\0", "") for argument in argv], command.positional, find_type=find_type
    )
    if arguments.help_topic is not None or arguments.files:
        return
    if arguments.is_sweep:
        expand_sweep(command.config, arguments.options)
    else:
        compose_typed(command.config, arguments.options)


def read_file(data: bytes) -> None:
    """Reads a YAML file of options of `moecast zoo list`."""
    path = write_input(data, "options.yaml")
    read_option_file(path)
    compose_typed("zoo_list", [], [path])
