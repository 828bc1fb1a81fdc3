"""The error boundary of every program: one line on stderr and an exit code."""

import logging
import os
import sys
import traceback
from collections.abc import Sequence

from configs.commands import Command
from configs.invocation import Invocation
from predictors.errors import MoecastError, NegativeResult, describe_error
from predictors.table import escape_controls
from runtime.library_defaults import set_library_defaults

FAILED, USAGE, INTERRUPTED = 1, 2, 130
MOST_CHARACTERS = 4000
"""Longest error line."""


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
    correct (2), a NegativeResult the answer "no" (1), any other is a failure (1). `debug=true`
    prints the traceback too.
    """
    set_library_defaults()
    arguments = list(sys.argv[1:] if argv is None else argv)
    invocation = Invocation(called=called or f"python -m {program}", argv=arguments)
    debug = any(argument.lower().lstrip("-") in ("debug", "debug=true") for argument in arguments)
    try:
        # Imported here, where Ctrl-C is handled: it takes most of a second.
        from configs.execution import run_command

        return run_command(program, commands, invocation)
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MoecastError as error:
        print_error(invocation, f"error: {join_lines(error)}", debug)
        if error.ends_process:
            sys.stdout.flush()
            sys.stderr.flush()
            logging.shutdown()
            os._exit(USAGE)
        return USAGE
    except NegativeResult as result:
        print_error(invocation, join_lines(result), debug)
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if was_interrupted(error):
            print_error(invocation, invocation.explain_interruption(), debug)
            return INTERRUPTED
        hint = "" if debug else " (debug=true shows the traceback)"
        print_error(invocation, f"error: {join_lines(describe_error(error))}{hint}", debug)
        return FAILED


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an error came of Ctrl-C: imports on demand raise another one in its place."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def print_error(invocation: Invocation, line: str, debug: bool) -> None:
    if debug:
        sys.stderr.write(invocation.clean_line(traceback.format_exc()))
    sys.stderr.write(f"{invocation.clean_line(line)}\n")


def join_lines(error: BaseException | str) -> str:
    """Returns the message on one line of limited length: it may quote anything."""
    line = escape_controls(" ".join(str(error)[: 2 * MOST_CHARACTERS].split()))
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."
