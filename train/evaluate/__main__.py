"""`python -m train.evaluate`: one trace through every system, on simulated machines."""

import sys

from configs.cli import main
from configs.command import Command

COMMANDS = [
    Command(
        name="",
        config="evaluate",
        run="train.evaluate.commands:evaluate",
        summary=(
            "Replays the held-out requests of one trace through every system, on every machine, "
            "budget and batch size given, and ranks the systems: table, JSON, HTML report."
        ),
    )
]

if __name__ == "__main__":
    sys.exit(main("train.evaluate", COMMANDS))
