"""The project's modules as their files say: parsed, never imported."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("predictors", "zoo", "runtime", "collect", "train", "configs", "moecast")
HEAVY = {
    *("torch", "transformers", "datasets", "lightning", "wandb", "tensorboard", "mlflow", "ray"),
    *("onnxruntime", "onnx", "pandas", "matplotlib", "fastapi", "uvicorn", "prometheus_client"),
}
"""Libraries that take long to import: no entry point imports them before they are used."""


@dataclass(frozen=True)
class Import:
    """An import statement's effect on one name."""

    module: str
    """The module that is imported: `runtime.engine` of `from runtime.engine import Engine`."""
    name: str | None
    """What is taken from the module; None where the module itself is imported."""
    at_once: bool
    """Importing the module that has the statement runs it."""
    for_types: bool
    """The statement stands below `if TYPE_CHECKING:`."""


@dataclass(frozen=True)
class Source:
    """A module of the project."""

    path: str
    """Relative to the root: `runtime/engine.py`."""
    module: str
    """As it is imported: `runtime.engine`, `runtime` for its `__init__.py`."""
    text: str
    tree: ast.Module
    imports: tuple[Import, ...]


def sources(*packages: str) -> dict[str, Source]:
    """Return the modules of the packages, all but `benchmarks` unless named, by their names."""
    wanted = packages or PACKAGES
    return {name: entry for name, entry in _parse().items() if name.split(".")[0] in wanted}


@cache
def _parse() -> dict[str, Source]:
    folders = [ROOT / package for package in (*PACKAGES, "benchmarks")]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    names = {path: _module(path) for path in paths}
    known = set(names.values())
    parsed = {}
    for path, name in names.items():
        text = path.read_text()
        tree = ast.parse(text)
        imports = tuple(_imports(tree.body, known, at_once=True, for_types=False))
        parsed[name] = Source(str(path.relative_to(ROOT)), name, text, tree, imports)
    return parsed


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(nodes: Iterable, known: set, *, at_once: bool, for_types: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, at_once, for_types)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if module in known:
                    yield Import(module, None, at_once, for_types)
                else:
                    yield Import(node.module, alias.name, at_once, for_types)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.body, known, at_once=at_once, for_types=True)
            yield from _imports(node.orelse, known, at_once=at_once, for_types=for_types)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            now, children = at_once and not inside, ast.iter_child_nodes(node)
            yield from _imports(children, known, at_once=now, for_types=for_types)


def find_circle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Find nodes that lead from one to the next and back to the first, if there are any."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return []
