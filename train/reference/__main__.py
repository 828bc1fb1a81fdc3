"""`python -m train.reference corpus.root=PATH`: makes the reference model that ships."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from configs.program import hide_current_folder, run_program

    hide_current_folder()
    sys.exit(run_program("train.reference"))
