"""Builds an environment of its own for each client of the server: a venv with pinned packages.

    python -m benchmarks.serving.environments

`only=openai,litellm` builds some of them, `folder=PATH` elsewhere than in
`runs/serving/environments`. An environment that was built from the same files is kept.
"""

import sys
from pathlib import Path

from benchmarks.peers.environments import main

REQUIREMENTS = Path(__file__).parent / "requirements"
FOLDER = Path("runs/serving/environments")

if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    sys.exit(main(arguments, FOLDER, REQUIREMENTS))
