"""Versions of installed packages, from their metadata: nothing is imported."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

RESULT_PACKAGES = (
    *("moecast", "torch", "transformers", "numpy", "onnxruntime", "lightning", "datasets"),
)
"""Packages whose version may change a result."""


def package_version(name: str) -> str | None:
    """Return the installed version of a package, or None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    return {name: package_version(name) for name in names}
