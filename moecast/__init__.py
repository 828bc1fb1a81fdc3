"""Serves Mixture-of-Experts models from a small memory budget, with forecasts of their experts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.generation.loading import load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    # PyTorch and Transformers take seconds to import: nothing is imported before it is used.
    if name == "load":
        from runtime.openmp import let_waiting_threads_sleep

        let_waiting_threads_sleep()
        from runtime.generation.loading import load

        return load
    if name == "__version__":
        from predictors.versions import package_version

        return package_version("moecast") or "not installed"
    raise AttributeError(f"module 'moecast' has no attribute {name!r}")
