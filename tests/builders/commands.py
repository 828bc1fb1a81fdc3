"""Commands that call a function of the test's own module."""

from collections.abc import Callable
from typing import Any

from configs.commands import Command


def command_of(run: Callable, *, config: str = "zoo.config:ListConfig", **options: Any) -> Command:
    """The command has the function's name and a schema's options."""
    place = f"{run.__module__}:{run.__name__}"
    return Command(name=run.__name__, config=config, run=place, summary="Runs.", **options)
