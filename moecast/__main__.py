"""`moecast COMMAND`, also `python -m moecast COMMAND`: every program under one name."""

import sys
from pathlib import Path


def start() -> int:
    """Runs the command of the process's arguments; returns the exit code."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from configs.program import hide_current_folder

    hide_current_folder()
    from moecast.command import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(start())
