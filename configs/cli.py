"""One face for every program: arguments, help, run folder, and the one error boundary."""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.command import Command
from configs.compose import ConfigError, compose_typed, sweep
from configs.help import command_help, program_help
from configs.renamed import explain_command
from configs.run_folder import default_run_dir, describe
from predictors.config import SECRET
from predictors.errors import MoecastError, unknown
from predictors.files import write_json

HELP = ("-h", "--help", "help")
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
HIDDEN = "(not kept)"


def main(program: str, commands: Sequence[Command], argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    `program` is the package's name. The one place where an exception becomes a line on stderr:
    a MoecastError is the user's to mend (2), anything else is a failure (1); `debug=true` shows
    the traceback of both.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = any(one.lower() == "debug=true" for one in arguments)
    try:
        return dispatch(program, commands, arguments)
    except KeyboardInterrupt:
        complain("interrupted; the same command carries on or starts again", debug)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left: nobody to tell. Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MoecastError as error:
        complain(f"error: {flat(error)}", debug)
        return USAGE
    except Exception as error:
        hint = "" if debug else " (debug=true shows where)"
        complain(f"error: {type(error).__name__}: {flat(error)}{hint}", debug)
        return FAILED


def dispatch(program: str, commands: Sequence[Command], arguments: list[str]) -> int:
    """Finds the command that the arguments name, and runs it once or as a sweep."""
    table = {command.name: command for command in commands}
    if not arguments and "" not in table:
        sys.stderr.write(program_help(program, commands))
        return USAGE
    if arguments and arguments[0] in HELP and (len(commands) > 1 or "" not in table):
        sys.stdout.write(program_help(program, commands))
        return OK
    if arguments and arguments[0] in table:
        command, arguments = table[arguments[0]], arguments[1:]
    elif arguments and (message := explain_command(program, arguments[0])):
        raise ConfigError(message)
    elif "" in table:
        command = table[""]
    else:
        raise ConfigError(unknown("command", arguments[0], table))
    if any(one in HELP[:2] for one in arguments):
        sys.stdout.write(command_help(program, command))
        return OK
    multiple = any(one in ("-m", "--multirun") for one in arguments)
    options = named([one for one in arguments if one not in ("-m", "--multirun")], command)
    if multiple:
        run_sweep(program, command, options)
    else:
        run_once(program, command, options, arguments)
    return OK


def named(arguments: Sequence[str], command: Command) -> list[str]:
    """The arguments with the bare first one written as `key=value`."""
    options = list(arguments)
    if options and command.positional and is_bare(options[0]):
        options[0] = f"{command.positional}={options[0]}"
    for one in options:
        if one.startswith("-"):
            raise ConfigError(f"{one!r} is not an option: write key=value; --help lists the keys")
    return options


def is_bare(argument: str) -> bool:
    """Whether an argument is a value alone: no key before its first `=`."""
    key, equals, _ = argument.partition("=")
    return not argument.startswith("-") and not (equals and key.replace(".", "").isidentifier())


def run_once(
    program: str,
    command: Command,
    options: Sequence[str],
    argv: Sequence[str],
    run_dir: Path | None = None,
) -> Any:
    """Composes, runs and records one run; returns what the command returned."""
    config, tree = compose_typed(command.config, options)
    label = "-".join(filter(None, (program, command.name)))
    folder = run_dir or config.run_dir
    if folder is None and command.keeps_run:
        folder = default_run_dir(label)
    config.run_dir = folder
    tree.run_dir = None if folder is None else str(folder)
    module, _, function = command.run.partition(":")
    run = getattr(import_module(module), function)
    if folder is not None and command.records:
        resolved = OmegaConf.to_container(tree, resolve=True)
        record = describe(label, without_secrets(argv, config), resolved, config.seed)
        record["config"].update(dict.fromkeys(secrets_of(config), HIDDEN))
        write_json(folder / "run.json", record)
    results = run(config)
    if folder is not None and command.records and results is not None:
        write_json(folder / "results.json", results)
    return results


def secrets_of(config: Any) -> list[str]:
    """The options whose values are written nowhere, of those that are set."""
    return [
        field.name
        for field in fields(config)
        if SECRET in field.metadata and getattr(config, field.name) is not None
    ]


def without_secrets(argv: Sequence[str], config: Any) -> list[str]:
    """The arguments as they may be kept."""
    names = secrets_of(config)
    return [
        f"{one.partition('=')[0]}={HIDDEN}" if one.partition("=")[0] in names else one
        for one in argv
    ]


def run_sweep(program: str, command: Command, options: Sequence[str]) -> None:
    """`-m`: one run after another over the grid of comma lists, in numbered folders.

    The first failure ends the sweep: what the runs before it wrote stays.
    """
    label = "-".join(filter(None, (program, command.name)))
    chosen = [one.partition("=")[2] for one in options if one.startswith("run_dir=")]
    folder = Path(chosen[-1]) if chosen else default_run_dir(label)
    jobs = sweep([one for one in options if not one.startswith("run_dir=")])
    record = []
    for number, job in enumerate(jobs):
        target = folder / str(number)
        sys.stderr.write(f"run {number + 1} of {len(jobs)}: {' '.join(job)} -> {target}\n")
        results = run_once(program, command, job, job, run_dir=target)
        record.append({"number": number, "options": job, "results": results})
        write_json(folder / "sweep.json", record)


def complain(line: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"{line}\n")


def flat(error: BaseException) -> str:
    """The whole message on one line."""
    return " ".join(str(error).split())
