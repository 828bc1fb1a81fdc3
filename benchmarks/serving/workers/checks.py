"""What the workers share.

Of the standard library alone, because each runs in the environment of the client that it is about.

    python with_NAME.py ORDER.json

The order holds `url`, `model`, `key`, `prompt`, `tokens` and `expected`, the greedy answer's text.
Printed is one JSON object: `version`, and `checks`, by name null or what went wrong.
"""

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHECKS: dict[str, Callable[[], None]] = {}


def order() -> dict[str, Any]:
    return json.loads(Path(sys.argv[1]).read_text())


def check(done: Callable[[], None]) -> Callable[[], None]:
    """Registers a check: a function that fails by an exception."""
    CHECKS[done.__name__] = done
    return done


def equal(found: object, expected: object) -> None:
    assert found == expected, f"{found!r}, expected {expected!r}"


def refused(kind: type[Exception], done: Callable[[], object]) -> None:
    """The client raises its own exception for it."""
    try:
        done()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def report(package: str) -> None:
    """Runs every check, and prints what came of it."""
    found: dict[str, str | None] = {}
    for name, done in CHECKS.items():
        try:
            done()
            found[name] = None
        except Exception as error:
            # A check that fails in any way is a result; the others go on.
            found[name] = "".join(traceback.format_exception_only(error)).strip()
    sys.stdout.write(json.dumps({"version": version(package), "checks": found}) + "\n")
