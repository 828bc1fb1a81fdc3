"""Runs a command once or as a sweep, and records what it did."""

import errno
import fcntl
import gc
import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from configs.arguments import HELP, Arguments, read_arguments, read_options
from configs.commands import Command
from configs.compose import compose_typed, declared_type, expand_sweep
from configs.help import write_command_help, write_program_help
from configs.invocation import HIDDEN, Invocation
from predictors.config import SECRET
from predictors.errors import ConfigError, unknown
from predictors.files import CACHE, find_cache_folder, path_exists, write_json
from predictors.origin import RESULT_PACKAGES, name_machine, package_versions, read_git_revision

log = logging.getLogger(__name__)

RUN_DIR = "run_dir"
RUN, RESULTS = "run.json", "results.json"
IRRELEVANT = (RUN_DIR, "debug", "overwrite")
"""Options that change no result."""
OK, USAGE = 0, 2
CORRECTABLE = {
    *("EACCES", "EEXIST", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENOENT", "ENOTDIR", "EPERM", "EROFS")
}
"""Errors about the path itself; others, such as EIO, are failures of the machine."""


def run_command(program: str, commands: Sequence[Command], invocation: Invocation) -> int:
    """Finds the command of the arguments, and runs it once or as a sweep; returns the exit code."""
    table = {command.name: command for command in commands}
    called, argv = invocation.called, list(invocation.argv)
    if "" not in table and (not argv or (argv[0] in (*HELP, "help") and len(argv) == 1)):
        (sys.stdout if argv else sys.stderr).write(write_program_help(called, commands))
        return OK if argv else USAGE
    if argv[:1] == ["help"]:
        argv = [*argv[1:], HELP[1]]
    if argv and argv[0] in table:
        command, argv = table[argv[0]], argv[1:]
    elif "" in table:
        command = table[""]
        word = argv[0] if argv else ""
        is_misspelt = word.isidentifier() and get_close_matches(word, table, n=1, cutoff=0.75)
        # It would be the name of a model.
        if is_misspelt and not path_exists(word):
            raise ConfigError(unknown("command", word, filter(None, table)))
    else:
        raise ConfigError(unknown("command", argv[0], table))
    schema = import_named(command.config)
    invocation.protect([field.name for field in fields(schema) if SECRET in field.metadata])
    arguments = read_arguments(argv, command.positional, find_type=partial(declared_type, schema))
    if arguments.help_topic is not None:
        others = [other for other in commands if other.name] if not command.name else []
        topic = arguments.help_topic
        sys.stdout.write(write_command_help(called, command, schema, topic, others=others))
        return OK
    invocation.resumes = command.resumes
    label = "-".join(filter(None, (program, command.name)))
    if arguments.is_sweep:
        run_sweep(label, command, arguments, invocation)
    else:
        run_once(label, command, arguments, invocation)
    return OK


def run_once(
    label: str,
    command: Command,
    arguments: Arguments,
    invocation: Invocation,
    *,
    folder: Path | None = None,
) -> Any:
    """Composes, checks, records and runs a command; returns its results.

    `folder` is the run's in a sweep. Elsewhere it is `run_dir`, or a new one. It gets run.json
    before the run and results.json after it.
    """
    schema = import_named(command.config)
    config, tree = compose_typed(schema, arguments.options, arguments.files)
    invocation.add_secrets(list_leaves(tree))
    try:
        if command.check:
            import_named(command.check)(config)
        # Only now: a command that is refused leaves no folder.
        folder = folder or config.run_dir
        if folder is None and command.needs_run:
            folder = invocation.run_dir = make_run_dir(label)
        config = replace(config, run_dir=folder)
        if folder is None:
            return import_named(command.run)(config)
        tree[RUN_DIR] = str(folder)
        with hold_folder(folder):
            if command.resumes and folder == invocation.run_dir:
                # A kill leaves no time to say it.
                option = shlex.quote(f"{RUN_DIR}={folder}")
                sys.stderr.write(f"run folder: {folder} ({option} continues an interrupted run)\n")
            run = import_named(command.run)
            names = invocation.secret_names or ()
            hidden = {name: HIDDEN for name in names if tree[name] is not None}
            argv = invocation.hide_options(arguments.argv)
            record = invocation.hide(describe_run(label, argv, arguments.files, tree | hidden))
            with put_aside(folder, record):
                write_json(folder / RUN, record)
                results = run(config)
                if results is not None:
                    write_json(folder / RESULTS, invocation.hide(results))
                    sys.stderr.write(f"results: {folder / RESULTS}\n")
                return results
    except OSError as error:
        message = explain_path_error(error, [*list_leaves(tree), (CACHE, find_cache_folder())])
        if message is None:
            raise
        raise ConfigError(message) from error


def run_sweep(label: str, command: Command, arguments: Arguments, invocation: Invocation) -> None:
    """Runs every combination of the comma lists (`-m`), one after another in numbered folders.

    The first failure ends the sweep; the results of earlier runs stay.
    """
    options = read_options(arguments.options, arguments.files)
    folders = [Path(option.text) for option in options if option.key == RUN_DIR]
    if not folders:
        folders = [make_run_dir(label)]
        invocation.run_dir = folders[0]
    folder = folders[-1]
    varied = [option for option in arguments.options if not option.startswith(f"{RUN_DIR}=")]
    jobs = expand_sweep(import_named(command.config), varied)
    record = []
    for number, job in enumerate(jobs):
        target = folder / str(number)
        shown = invocation.hide_options(job)
        sys.stderr.write(f"run {number + 1} of {len(jobs)}: {' '.join(shown)} -> {target}\n")
        single = Arguments(argv=job, options=job, files=arguments.files)
        results = run_once(label, command, single, invocation, folder=target)
        record.append({"number": number, "options": shown, "results": invocation.hide(results)})
        write_json(folder / "sweep.json", record)


def list_leaves(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and values of the leaves of plain dictionaries and lists."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from list_leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        for value in values:
            yield from list_leaves(value, key)
    else:
        yield key, values


def make_run_dir(command: str) -> Path:
    """Makes runs/COMMAND/TIME, numbered if several runs start within one second.

    Raises:
        ConfigError: the current folder cannot be written to.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in count(1):
        folder = Path("runs", command, stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.is_dir():
                continue
            raise ConfigError(
                f"the current folder cannot be written to ({error.strerror}); run_dir=PATH names "
                "another for the run"
            ) from error
    raise AssertionError


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keeps a run folder for this command while it runs; ConfigError if another command has it.

    Lightning runs the whole command once for each device, all with the first one's folder.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"run_dir={folder}: another command runs in this folder; wait for it or name another"
        ) from error
    except OSError as error:
        # A network disk may have no such locks.
        log.debug("%s is not locked: %s", folder, error)
    else:
        bring_back(folder)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def put_aside(folder: Path, record: Mapping[str, Any]) -> Iterator[None]:
    """Keeps an earlier run of another configuration: its record and results stay together.

    They would be taken for this run's, and are back if it fails; if it is killed, as soon as the
    next one begins.
    """
    earlier = [path for path in (folder / RUN, folder / RESULTS) if path.is_file()]
    if len(earlier) < 2 or is_same_run(json.loads(earlier[0].read_bytes()), record):
        yield
        return
    places = [(path, place_aside(path)) for path in earlier]
    for path, aside in places:
        path.replace(aside)
    try:
        yield
    except BaseException:
        for path, aside in places:
            aside.replace(path)
        raise
    for _, aside in places:
        aside.unlink()


def place_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.earlier")


def bring_back(folder: Path) -> None:
    """Restores what a killed run had put aside, unless it has results of its own."""
    results = folder / RESULTS
    is_finished = results.is_file() and place_aside(results).is_file()
    for path in (folder / RUN, results):
        if (aside := place_aside(path)).is_file():
            if is_finished:
                aside.unlink()
            else:
                aside.replace(path)


def is_same_run(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the records of two runs are of one command and configuration."""
    one, two = (
        {key: value for key, value in run.get("config", {}).items() if key not in IRRELEVANT}
        for run in (record, other)
    )
    return record.get("command") == other["command"] and one == json.loads(json.dumps(two))


def describe_run(
    command: str, argv: Sequence[str], files: Sequence[Path], config: Any
) -> dict[str, Any]:
    """Returns the content of run.json; `config` is the resolved tree of plain values."""
    return {
        "command": command,
        "argv": list(argv),
        "config_files": list(map(str, files)),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": config["seed"],
        "git_revision": read_git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "machine": name_machine(),
        "versions": package_versions(RESULT_PACKAGES),
        "config": config,
    }


def explain_path_error(error: OSError, options: Iterable[tuple[str, Any]]) -> str | None:
    """Returns the message for an error about a path, with the option that named it or a parent.

    None for an error of another kind.
    """
    is_correctable = errno.errorcode.get(error.errno or 0) in CORRECTABLE
    if not is_correctable or not isinstance(error.filename, str | bytes):
        return None
    path = Path(os.path.abspath(os.fsdecode(error.filename)))  # noqa: PTH100
    message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    named = [
        (len(str(value)), f"{key}={value}")
        for key, value in options
        if isinstance(value, str | Path)
        and (is_or_contains(str(value), path) or (key == CACHE and path in Path(value).parents))
    ]
    return f"{max(named)[1]}: {message}" if named else message


def is_or_contains(value: str, path: Path) -> bool:
    if not value or "\0" in value:
        return False
    named = Path(os.path.abspath(os.path.expanduser(value)))  # noqa: PTH100, PTH111
    return named == path or (value not in (".", "/") and named in path.parents)


def import_named(path: str) -> Any:
    """Returns what `package.module:name` names: a function, or a class.

    Imports make a million objects that stay: to look for garbage among them meanwhile finds none,
    and takes a tenth of the time.
    """
    module, _, name = path.partition(":")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(module), name)
    finally:
        if was_enabled:
            gc.enable()
