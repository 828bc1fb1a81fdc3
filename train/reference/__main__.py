"""`python -m train.reference corpus.root=PATH`: makes the reference model that ships."""

import sys

from configs.cli import main
from configs.command import Command

COMMANDS = (
    Command(
        name="",
        config="reference",
        run="train.reference.commands:run",
        summary="train, audit and write the reference model qwen2-moe-tiny",
    ),
)

if __name__ == "__main__":
    sys.exit(main("train.reference", COMMANDS))
