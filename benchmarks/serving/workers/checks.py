"""Checks of a client, for the workers; of the standard library alone.

Each worker runs in the environment of its client: `python with_NAME.py REQUEST.json REPORT.json`.
The request holds `url`, `model`, `key`, `prompt`, `tokens` and `expected`, the greedy text.
The report holds `version`, and `checks`: null, or the failure of each check.
"""

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHECKS: dict[str, Callable[[], None]] = {}


def read_request() -> dict[str, Any]:
    return json.loads(Path(sys.argv[1]).read_text())


def check(done: Callable[[], None]) -> Callable[[], None]:
    """Registers a check: a function that raises if it fails."""
    CHECKS[done.__name__] = done
    return done


def equal(value: object, expected: object) -> None:
    assert value == expected, f"got {value!r}, expected {expected!r}"


def refused(kind: type[Exception], done: Callable[[], object]) -> None:
    """Checks that the client raises its own exception."""
    try:
        done()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def report(package: str) -> None:
    """Runs every check and writes the report."""
    results: dict[str, str | None] = {}
    for name, done in CHECKS.items():
        try:
            done()
            results[name] = None
        except Exception as error:
            # Any failure of a check is a result; the others still run.
            results[name] = "".join(traceback.format_exception_only(error)).strip()
    document = {"version": version(package), "checks": results}
    Path(sys.argv[2]).write_text(json.dumps(document))
