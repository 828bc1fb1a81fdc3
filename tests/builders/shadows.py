"""A user's folder, whose files have the names of this project's packages."""

from pathlib import Path

PACKAGES = ("collect/__init__.py", "configs/__init__.py")
NAMES = (*PACKAGES, "predictors.py", "runtime.py", "train.py", "zoo.py")
FILE = 'raise RuntimeError(f"a file of the user was imported: {__file__}")\n'


def shadowing_folder(folder: Path) -> Path:
    """Fill a folder with modules and packages that raise an error when they are imported."""
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILE)
    return folder
