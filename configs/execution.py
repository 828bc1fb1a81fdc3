"""Runs a command once or as a sweep, and records what it did."""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from configs.arguments import Arguments, read_arguments
from configs.command import Command
from configs.compose import compose_defaults, compose_typed, declared_type
from configs.errors import ConfigError
from configs.help import write_command_help, write_program_help
from configs.invocation import Invocation
from configs.options import read_options
from configs.path_errors import explain_path_error
from configs.run_record import default_run_dir, describe_run
from configs.secrets import HIDDEN, secret_names
from configs.sweep import expand_sweep
from configs.typed import flatten_values
from predictors.errors import unknown
from predictors.files import path_exists, write_json

HELP = ("-h", "--help", "help")
RUN_DIR = "run_dir"
OK, USAGE = 0, 2


def run_command(program: str, commands: Sequence[Command], invocation: Invocation) -> int:
    """Finds the command of the arguments, and runs it once or as a sweep; returns the exit code."""
    table = {command.name: command for command in commands}
    called, argv = invocation.called, list(invocation.argv)
    if not argv and "" not in table:
        sys.stderr.write(write_program_help(called, commands))
        return USAGE
    if argv and argv[0] in HELP and not argv[1:] and "" not in table:
        sys.stdout.write(write_program_help(called, commands))
        return OK
    if argv[:1] == ["help"]:
        argv = [*argv[1:], HELP[1]]
    if argv and argv[0] in table:
        command, argv = table[argv[0]], argv[1:]
    elif "" in table:
        command = table[""]
        if argv and argv[0].isidentifier() and not path_exists(argv[0]):
            refuse_misspelt(argv[0], table)
    else:
        raise ConfigError(unknown("command", argv[0], table))
    invocation.protect(secret_names(command.config))
    arguments = read_arguments(argv, command.positional, find_type=find_type_of(command))
    if arguments.help_topic is not None:
        others = [other for other in commands if other.name] if not command.name else []
        topic = arguments.help_topic
        sys.stdout.write(write_command_help(called, command, topic, others=others))
        return OK
    invocation.resumes = command.resumes
    label = "-".join(filter(None, (program, command.name)))
    if arguments.is_sweep:
        run_sweep(label, command, arguments, invocation)
    else:
        run_once(label, command, arguments, invocation)
    return OK


def refuse_misspelt(word: str, table: Mapping[str, Command]) -> None:
    """Raises ConfigError if a word is close to a command's name, where it would be a model."""
    if get_close_matches(word, table, n=1, cutoff=0.75):
        raise ConfigError(unknown("command", word, filter(None, table)))


def find_type_of(command: Command) -> Callable[[str], Any]:
    """Returns the function that finds the declared type of a command's option."""

    def find_type(key: str) -> Any:
        config, groups = compose_defaults(command.config)
        return declared_type(config, key, groups)

    return find_type


def run_once(
    label: str,
    command: Command,
    arguments: Arguments,
    invocation: Invocation,
    *,
    folder: Path | None = None,
) -> Any:
    """Composes, checks, records and runs a command; returns its results.

    `folder` is the run's in a sweep. Elsewhere it is `run_dir`, or a new one.
    """
    config, tree = compose_typed(command.config, arguments.options, arguments.files)
    folder = folder or config.run_dir
    if folder is None and command.keeps_run:
        folder = invocation.run_dir = default_run_dir(label)
    config.run_dir = folder
    tree["run_dir"] = None if folder is None else str(folder)
    invocation.add_secrets(flatten_values(tree))
    try:
        return run_recorded(label, command, arguments, invocation, config=config, tree=tree)
    except OSError as error:
        message = explain_path_error(error, flatten_values(tree))
        if message is None:
            raise
        raise ConfigError(message) from error


def run_recorded(
    label: str,
    command: Command,
    arguments: Arguments,
    invocation: Invocation,
    *,
    config: Any,
    tree: dict[str, Any],
) -> Any:
    """Runs a command with a typed configuration; writes run.json before it and results.json."""
    folder = config.run_dir
    if command.check:
        import_function(command.check)(config)
    if command.resumes and folder is not None and folder == invocation.run_dir:
        # A kill leaves no time to say it.
        sys.stderr.write(f"run folder: {folder} (run_dir={folder} continues an interrupted run)\n")
    run = import_function(command.run)
    if folder is not None and command.records:
        names = invocation.secret_names or ()
        hidden = {name: HIDDEN for name in names if tree[name] is not None}
        argv = invocation.hide_options(arguments.argv)
        record = describe_run(label, argv, arguments.files, tree | hidden)
        write_json(folder / "run.json", invocation.hide(record))
    results = run(config)
    if folder is not None and command.records and results is not None:
        write_json(folder / "results.json", invocation.hide(results))
        sys.stderr.write(f"results: {folder / 'results.json'}\n")
    return results


def run_sweep(label: str, command: Command, arguments: Arguments, invocation: Invocation) -> None:
    """Runs every combination of the comma lists (`-m`), one after another in numbered folders.

    The first failure ends the sweep; the results of earlier runs stay.
    """
    options = read_options(arguments.options, arguments.files)
    folders = [Path(option.text) for option in options if option.key == RUN_DIR]
    if not folders:
        folders = [default_run_dir(label)]
        invocation.run_dir = folders[0]
    folder = folders[-1]
    varied = [option for option in arguments.options if not option.startswith(f"{RUN_DIR}=")]
    jobs = expand_sweep(command.config, varied)
    record = []
    for number, job in enumerate(jobs):
        target = folder / str(number)
        shown = invocation.hide_options(job)
        sys.stderr.write(f"run {number + 1} of {len(jobs)}: {' '.join(shown)} -> {target}\n")
        single = Arguments(argv=job, options=job, files=arguments.files)
        results = run_once(label, command, single, invocation, folder=target)
        record.append({"number": number, "options": shown, "results": invocation.hide(results)})
        write_json(folder / "sweep.json", record)


def import_function(path: str) -> Callable[..., Any]:
    """Returns the function that `package.module:function` names.

    Imports make a million objects that stay: to look for garbage among them meanwhile finds none,
    and takes a tenth of the time.
    """
    module, _, function = path.partition(":")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(module), function)
    finally:
        if was_enabled:
            gc.enable()
