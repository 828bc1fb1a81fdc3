"""Imports the packages of this project, whatever files of the same names lie in a user's folder."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1]
PACKAGES = ("predictors", "zoo", "runtime")
"""Those that the functions of `moecast` need. A script's own `train.py`, `collect.py` or
`configs.py` can be imported as before."""


def import_own(module: str) -> ModuleType:
    """Imports a module of this project, though a script's folder has files of its package's name.

    Raises:
        ImportError: a file of the user's was imported under the name of one of `PACKAGES`.
    """
    for name in PACKAGES:
        package = sys.modules.get(name) or import_package(name)
        file = package.__file__
        if file is None or FOLDER not in Path(file).resolve().parents:
            raise ImportError(
                f"moecast has a package named {name}, and {file or 'a folder'} was imported "
                "under this name: rename that file or folder",
                name=name,
                path=file,
            )
    return import_module(module)


def import_package(name: str) -> ModuleType:
    """Imports a package from this project's folder."""
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
