"""Imports only go down, nothing heavy is imported for `--help`, files stay of a readable size.

Read from the source, nothing of it is imported.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "predictors": set(),
    "zoo": {"predictors"},
    "runtime": {"predictors", "zoo"},
    "collect": {"predictors", "runtime"},
    "train": {"predictors", "zoo", "runtime", "collect"},
}
HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "lightning",
    "wandb",
    "onnxruntime",
    "onnx",
    "matplotlib",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "ray",
}
SOURCES = sorted(
    path for package in [*MAY_IMPORT, "configs"] for path in (ROOT / package).rglob("*.py")
)
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level package of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def imported_at_once(path: Path) -> set[str]:
    """Top-level packages that importing the module imports by itself."""
    return {name for node in ast.parse(path.read_text()).body for name in imported_by(node)}


def imported_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from imported(ast.Module(body=[node], type_ignores=[]))


@pytest.mark.parametrize("name", NAMES)
def test_imports__go_down_only(name: str) -> None:
    package = name.split("/")[0]
    if package == "configs":
        return
    used = set(imported(ast.parse((ROOT / name).read_text()))) & {*MAY_IMPORT, "configs"}
    allowed = MAY_IMPORT[package] | {package}
    if name.endswith("__main__.py"):
        allowed = allowed | {"configs"}
    assert used <= allowed, f"{name} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("package", MAY_IMPORT)
@pytest.mark.parametrize("module", ["__init__.py", "config.py", "__main__.py"])
def test_faces__import_nothing_heavy(package: str, module: str) -> None:
    path = ROOT / package / module
    if path.exists():
        assert not imported_at_once(path) & HEAVY


@pytest.mark.parametrize("name", NAMES)
def test_files__stay_readable(name: str) -> None:
    lines = len((ROOT / name).read_text().splitlines())
    assert lines <= (60 if name.endswith("__main__.py") else 600)


@pytest.mark.parametrize("name", NAMES)
def test_sources__unpickle_nothing(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    assert not set(imported(tree)) & {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
    loads = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert not loads
