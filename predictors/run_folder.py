"""The zoo entries in the folder of a training run."""

from pathlib import Path
from typing import TypeVar

from predictors.errors import PredictorError
from predictors.files import path_exists
from predictors.registry import KINDS, REUSE_PREDICTORS

ENTRIES = "entries"
"""Folder of a run's entries, each in a folder with the name of its kind."""
Chosen = TypeVar("Chosen", bound=str | Path)
RUN_RECORD = "run.json"
MANIFEST = "manifest.json"


def find_run_entries(folder: Path) -> Path | None:
    """Returns the folder of a run's entries; None if `folder` is not that of a training run.

    Raises PredictorError if it is a run's and has no entries.
    """
    if not path_exists(folder):
        return None
    entries = folder / ENTRIES
    if any(entries.glob(f"*/{MANIFEST}")):
        return entries
    if entries.is_dir() or (folder / RUN_RECORD).is_file():
        raise PredictorError(
            f"{folder} is a run without entries: `moecast train` writes them at the end of a run. "
            f"Repeat its command with run_dir={folder} to complete it"
        )
    return None


def separate_run(chosen: Chosen | None, entries: Path | None) -> tuple[Chosen | None, Path | None]:
    """Returns predictor and folder of entries, where a run's folder may stand for either.

    A run as the predictor means its entries of the kinds that each system names. A kind is one even
    if a folder has its name.
    """
    if chosen is not None and str(chosen) not in {*KINDS, *REUSE_PREDICTORS}:
        found = find_run_entries(Path(chosen))
        if found is not None:
            return None, found
    if entries is not None:
        entries = find_run_entries(entries) or entries
    return chosen, entries
