"""Serves a Mixture-of-Experts model from a memory budget; `load` is the way in."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.generation.loading import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # Transformers takes seconds to import; `--help` and the policy core do without it.
    if name == "load":
        from runtime.generation.loading import load

        return load
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
