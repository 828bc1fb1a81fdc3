"""Serves Mixture-of-Experts models from a small memory budget, with forecasts of their experts."""

from typing import TYPE_CHECKING, Any

from moecast.own_packages import import_own

if TYPE_CHECKING:
    from runtime.generation.loading import load
    from runtime.tools.verify.report import verify
    from zoo.catalog import Zoo
    from zoo.commands.pull import pull

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
        import_own("runtime.openmp").let_waiting_threads_sleep()
        return getattr(import_own(MODULES[name]), name)
    if name == "__version__":
        return import_own("predictors.origin").package_version("moecast") or "not installed"
    raise AttributeError(f"module 'moecast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
