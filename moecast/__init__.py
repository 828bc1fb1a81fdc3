"""Serves Mixture-of-Experts models from a small memory budget, with forecasts of their experts.

It imports the packages of this project, whatever files of the same names lie in a user's folder.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.generation.loading import load
    from runtime.tools.verify.report import verify
    from zoo.catalog import Zoo
    from zoo.commands.pull import pull

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
        package = sys.modules.get(name)
        if package is None:
            sys.path.insert(0, str(FOLDER))
            try:
                package = import_module(name)
            finally:
                sys.path.remove(str(FOLDER))
        file = package.__file__
        if file is None or FOLDER not in Path(file).resolve().parents:
            raise ImportError(
                f"moecast has a package named {name}, and {file or 'a folder'} was imported "
                "under this name: rename that file or folder",
                name=name,
                path=file,
            )
    return import_module(module)


__all__ = ["Zoo", "__version__", "load", "pull", "verify"]

MODULES = {
    "Zoo": "zoo.catalog",
    "load": "runtime.generation.loading",
    "pull": "zoo.commands.pull",
    "verify": "runtime.tools.verify.report",
}
"""Name to the module that defines it. PyTorch and Transformers take seconds to import: nothing is
imported before it is used."""


def __getattr__(name: str) -> Any:
    if name in MODULES:
        # Before PyTorch is imported.
        import_own("runtime.library_defaults").set_library_defaults()
        return getattr(import_own(MODULES[name]), name)
    if name == "__version__":
        return import_own("predictors.origin").package_version("moecast") or "not installed"
    raise AttributeError(f"module 'moecast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
