"""Imports only go down, nothing heavy is imported for `--help`, files stay of a readable size.

Read from the source, nothing of it is imported.
"""

import ast

import pytest

from tests.builders.sources import HEAVY, PACKAGES, find_circle, sources

MAY_IMPORT = {
    "predictors": set(),
    "zoo": {"predictors"},
    "runtime": {"predictors", "zoo"},
    "collect": {"predictors", "zoo", "runtime"},
    "train": {"predictors", "zoo", "runtime", "collect"},
}
ROOMS = (
    "config", "errors", "openmp", "accelerator", "presets", "compiled", "policy", "store",
    "transfer", "sim", "hf", "engine", "profiling", "generation", "serving", "tools", "commands",
)  # fmt: skip
"""Of `runtime`, from the bottom to the top; its `__init__` and `__main__` import what they like."""
PURE = ("policy", "sim")
"""Rooms of `runtime` that decide and compute, without tensors and threads."""
VENDOR_MODULES = ("torch.cuda", "torch.xpu", "torch.mps")
"""Modules that `runtime.accelerator` alone may name."""
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve"}


FOREIGN_LOADERS = ("benchmarks.peers.workers.with_airllm",)
"""Load with another library, which has no such argument."""


def top(module: str) -> str:
    return module.split(".")[0]


def room(module: str) -> str | None:
    """The room of `runtime` that a module is in; None outside of it and in its entry points."""
    package, *rest = module.split(".")
    return rest[0] if package == "runtime" and rest and rest[0] != "__main__" else None


def loaded_with(module: str) -> dict[str, str]:
    """Everything that importing a module imports, each with the module of ours that does so."""
    ours = sources()
    seen, waiting, loaded = set(), [module], {}
    while waiting:
        name = waiting.pop()
        parents = [".".join(name.split(".")[:end]) for end in range(1, name.count(".") + 1)]
        for current in [name, *parents]:
            if current in seen or current not in ours:
                continue
            seen.add(current)
            for entry in ours[current].imports:
                if entry.at_once and not entry.for_types:
                    loaded.setdefault(entry.module, current)
                    waiting.append(entry.module)
    return loaded


def test_packages__import_only_those_below() -> None:
    """Those that are not in the table import what they like, but for the top-level one."""
    offenders = []
    for source in sources(*PACKAGES, "benchmarks").values():
        package = top(source.module)
        allowed = MAY_IMPORT.get(package, {*PACKAGES} - {"moecast"}) | {package}
        if source.path.endswith("__main__.py"):
            allowed = allowed | {"configs"}
        used = {top(entry.module) for entry in source.imports} & {*PACKAGES}
        offenders += [f"{source.path} imports {name}" for name in used - allowed]
    assert not offenders


def test_rooms__import_only_those_below() -> None:
    height = {name: place for place, name in enumerate(ROOMS)}
    offenders = []
    for source in sources("runtime").values():
        here = room(source.module)
        if here is None:
            continue
        if here not in height:
            offenders.append(f"{here} is no room")
            continue
        targets = {room(entry.module) for entry in source.imports if not entry.for_types}
        up = {name for name in targets if name in height and height[name] > height[here]}
        offenders += [f"{here} imports {name}" for name in up]
    assert not offenders


def test_modules__import_in_no_circle() -> None:
    ours = sources()
    arrows = {}
    for source in ours.values():
        imported = {entry.module for entry in source.imports if not entry.for_types}
        arrows[source.module] = sorted(imported & {*ours} - {source.module})
    assert " <-> ".join(find_circle(arrows)) == ""


def test_policy_and_simulator__need_no_torch_and_no_threads() -> None:
    offenders = {}
    for module in sources():
        for name, by in loaded_with(module).items() if room(module) in PURE else ():
            if top(name) in {"torch", "threading", "concurrent", "multiprocessing"}:
                offenders[f"{module} loads {top(name)}"] = f"through {by}"
    assert not offenders


def test_modules__import_no_underscored_name_of_another() -> None:
    offenders = []
    for source in sources(*PACKAGES, "benchmarks").values():
        for entry in source.imports:
            if top(entry.module) in {*PACKAGES, "benchmarks"}:
                private = [n for n in (entry.name or "", *entry.module.split(".")) if hidden(n)]
                offenders += [f"{source.path} imports {name}" for name in private]
    assert not offenders


def hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("module", ["", ".config", ".__main__"])
def test_entry_points__import_nothing_heavy(module: str) -> None:
    ours = sources()
    offenders = []
    for package in (*MAY_IMPORT, "moecast"):
        if source := ours.get(package + module):
            at_once = {top(entry.module) for entry in source.imports if entry.at_once}
            offenders += [f"{source.path} imports {name}" for name in at_once & HEAVY]
    assert not offenders


def test_files__stay_readable() -> None:
    for source in sources().values():
        most = 60 if source.path.endswith("__main__.py") else 600
        assert source.text.count("\n") <= most, source.path


def test_sources__unpickle_nothing() -> None:
    offenders = []
    for source in sources().values():
        used = {top(entry.module) for entry in source.imports}
        offenders += [f"{source.path} imports {name}" for name in used & PICKLES]
        offenders += [
            f"{source.path}:{node.lineno} calls torch.load"
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        ]
    assert not offenders


def test_sources__name_no_kind_of_accelerator() -> None:
    """All others go through `runtime.accelerator`, so that each device works as CUDA does."""
    others = sources(*PACKAGES, "benchmarks")
    del others["runtime.accelerator"]
    offenders = [
        f"{source.path}:{node.lineno} uses {ast.unparse(node)}"
        for source in others.values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in VENDOR_MODULES
    ]
    offenders += [
        f"{source.path} imports {entry.module}"
        for source in others.values()
        for entry in source.imports
        if f"{entry.module}.{entry.name}".startswith(VENDOR_MODULES)
    ]
    assert not offenders


def test_models__are_never_loaded_with_code_of_their_own() -> None:
    """Without the argument, Transformers asks standard input whether to run that code."""
    offenders = [
        f"{source.path}:{node.lineno}"
        for source in sources(*PACKAGES, "benchmarks").values()
        if source.module not in FOREIGN_LOADERS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and "trust_remote_code=False" not in map(ast.unparse, node.keywords)
    ]
    assert not offenders
