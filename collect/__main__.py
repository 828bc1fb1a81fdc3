"""`python -m collect`: record a trace, or import one from a routing log."""

import sys

from configs.cli import main
from configs.command import Command

COMMANDS = (
    Command(
        name="",
        config="collect",
        run="collect.commands:record",
        summary="Runs prompts through a model and records its hidden states and routing.",
    ),
    Command(
        name="import",
        config="import",
        run="collect.commands:import_log",
        summary="Makes a routing-only trace from a published routing log (JSON lines).",
        positional="source",
    ),
)

if __name__ == "__main__":
    sys.exit(main("collect", COMMANDS))
