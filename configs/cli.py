"""The command line of every program: arguments, help, run folder, and the error boundary."""

import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.command import Command
from configs.compose import ConfigError, compose_typed, expand_sweep
from configs.help import write_command_help, write_program_help
from configs.renamed import explain_command
from predictors.config import SECRET
from predictors.errors import MoecastError, unknown
from predictors.files import write_json
from predictors.versions import package_versions

HELP = ("-h", "--help", "help")
MULTIRUN = ("-m", "--multirun")
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
HIDDEN = "(hidden)"
"""Written in place of secrets."""
RECORDED = ("moecast", "torch", "transformers", "numpy", "onnxruntime", "lightning", "datasets")
"""Packages whose version may change a result."""


def main(
    program: str,
    commands: Sequence[Command],
    argv: Sequence[str] | None = None,
    *,
    called: str | None = None,
) -> int:
    """Runs one command; returns the exit code: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    `called` is the program as the user called it, for the help; default: `python -m PROGRAM`.

    Every exception becomes one line on stderr here: a MoecastError is a fault that the user can
    correct (2), any other is a failure (1). `debug=true` prints the traceback of both.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = any(argument.lower() == "debug=true" for argument in arguments)
    try:
        return run_command(program, commands, arguments, called or f"python -m {program}")
    except KeyboardInterrupt:
        print_error("interrupted; run the same command again to continue or restart", debug)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MoecastError as error:
        print_error(f"error: {join_lines(error)}", debug)
        return USAGE
    except Exception as error:
        hint = "" if debug else " (debug=true shows the traceback)"
        print_error(f"error: {type(error).__name__}: {join_lines(error)}{hint}", debug)
        return FAILED


def run_command(
    program: str, commands: Sequence[Command], arguments: list[str], called: str
) -> int:
    """Finds the command of the arguments, and runs it once or as a sweep; returns the exit code."""
    table = {command.name: command for command in commands}
    if not arguments and "" not in table:
        sys.stderr.write(write_program_help(called, commands))
        return USAGE
    if arguments and arguments[0] in HELP and (len(commands) > 1 or "" not in table):
        sys.stdout.write(write_program_help(called, commands))
        return OK
    if arguments and arguments[0] in table:
        command, arguments = table[arguments[0]], arguments[1:]
    elif arguments and (message := explain_command(program, arguments[0])):
        raise ConfigError(message)
    elif "" in table:
        command = table[""]
    else:
        raise ConfigError(unknown("command", arguments[0], table))
    if any(argument in HELP[:2] for argument in arguments):
        sys.stdout.write(write_command_help(called, command))
        return OK
    options = [argument for argument in arguments if argument not in MULTIRUN]
    is_sweep = len(options) < len(arguments)
    options = expand_positional(options, command)
    if is_sweep:
        run_sweep(program, command, options)
    else:
        run_once(program, command, options, arguments)
    return OK


def expand_positional(arguments: Sequence[str], command: Command) -> list[str]:
    """Writes a bare first argument as `key=value`; ConfigError if one is not an option."""
    options = list(arguments)
    if options and command.positional and is_value(options[0]):
        options[0] = f"{command.positional}={options[0]}"
    for option in options:
        if option.startswith("-"):
            raise ConfigError(
                f"{option!r} is not an option: write key=value; --help lists the keys"
            )
    return options


def is_value(argument: str) -> bool:
    """Whether an argument is a value without a key before its first `=`."""
    key, equals, _ = argument.partition("=")
    return not argument.startswith("-") and not (equals and key.replace(".", "").isidentifier())


def run_once(
    program: str,
    command: Command,
    options: Sequence[str],
    argv: Sequence[str],
    run_dir: Path | None = None,
) -> Any:
    """Composes, runs and records a command; returns its results."""
    config, tree = compose_typed(command.config, options)
    label = "-".join(filter(None, (program, command.name)))
    folder = run_dir or config.run_dir
    if folder is None and command.keeps_run:
        folder = default_run_dir(label)
    config.run_dir = folder
    tree.run_dir = None if folder is None else str(folder)
    if command.check:
        import_function(command.check)(config)
    run = import_function(command.run)
    if folder is not None and command.records:
        resolved = OmegaConf.to_container(tree, resolve=True)
        record = describe_run(label, hide_secrets(argv, config), resolved, config.seed)
        record["config"].update(dict.fromkeys(secret_options(config), HIDDEN))
        write_json(folder / "run.json", record)
    results = run(config)
    if folder is not None and command.records and results is not None:
        write_json(folder / "results.json", results)
    return results


def import_function(path: str) -> Callable[[Any], Any]:
    """Returns the function that `package.module:function` names."""
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)


def secret_options(config: Any) -> list[str]:
    """Returns the options that are set and whose values must not be written."""
    return [
        field.name
        for field in fields(config)
        if SECRET in field.metadata and getattr(config, field.name) is not None
    ]


def hide_secrets(argv: Sequence[str], config: Any) -> list[str]:
    names = secret_options(config)
    return [
        f"{argument.partition('=')[0]}={HIDDEN}"
        if argument.partition("=")[0] in names
        else argument
        for argument in argv
    ]


def run_sweep(program: str, command: Command, options: Sequence[str]) -> None:
    """Runs every combination of the comma lists (`-m`), one after another in numbered folders.

    The first failure ends the sweep; the results of earlier runs stay.
    """
    label = "-".join(filter(None, (program, command.name)))
    folders = [option.partition("=")[2] for option in options if option.startswith("run_dir=")]
    folder = Path(folders[-1]) if folders else default_run_dir(label)
    jobs = expand_sweep([option for option in options if not option.startswith("run_dir=")])
    record = []
    for number, job in enumerate(jobs):
        target = folder / str(number)
        sys.stderr.write(f"run {number + 1} of {len(jobs)}: {' '.join(job)} -> {target}\n")
        results = run_once(program, command, job, job, run_dir=target)
        record.append({"number": number, "options": job, "results": results})
        write_json(folder / "sweep.json", record)


def print_error(line: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"{line}\n")


def join_lines(error: BaseException) -> str:
    return " ".join(str(error).split())


def default_run_dir(command: str) -> Path:
    """Returns runs/COMMAND/TIME, numbered if two runs start within one second."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = Path("runs", command, stamp)
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs", command, f"{stamp}-{number}")
    return folder


def describe_run(command: str, argv: Sequence[str], config: Any, seed: int) -> dict[str, Any]:
    """Returns the content of run.json; `config` is the resolved tree of plain values."""
    return {
        "command": command,
        "argv": list(argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "git_revision": read_git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "versions": package_versions(RECORDED),
        "config": config,
    }


def read_git_revision() -> str | None:
    """Returns the commit of this checkout, `-dirty` if edited; None outside a checkout."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"warning: the git revision could not be read ({error})\n")
        return None
    return done.stdout.strip()
