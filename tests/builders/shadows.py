"""A user's folder, whose files have the names of this project's packages."""

from pathlib import Path

NAMES = ("collect", "configs", "predictors", "runtime", "train", "zoo")
FILE = 'raise RuntimeError(f"a file of the user was imported: {__file__}")\n'


def shadowing_folder(folder: Path) -> Path:
    """Fill a folder with modules and packages that raise an error when they are imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(FILE)
    for name in ("configs", "collect"):
        (folder / f"{name}.py").unlink()
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(FILE)
    return folder
