"""`python -m benchmarks COMMAND`: run one benchmark, or write the tables of all results."""

import sys
from pathlib import Path

from configs.cli import main
from configs.commands import read_command
from predictors.typed_values import read_table

COMMANDS = tuple(
    read_command(name, row)
    for name, row in read_table(Path(__file__).with_name("commands.yaml")).items()
)

if __name__ == "__main__":
    sys.exit(main("benchmarks", COMMANDS))
