"""Imports only go down, nothing heavy is imported for `--help`, files stay of a readable size.

Read from the source, nothing of it is imported.
"""

import ast
import re
from itertools import accumulate

import pytest

from tests.builders.sources import HEAVY, PACKAGES, Source, find_circle, sources

MAY_IMPORT = {
    "predictors": set(),
    "zoo": {"predictors"},
    "runtime": {"predictors", "zoo"},
    "collect": {"predictors", "zoo", "runtime"},
    "train": {"predictors", "zoo", "runtime", "collect"},
}
ROOMS = (
    "config", "errors", "library_defaults", "accelerator", "presets", "compiled", "policy", "store",
    "transfer", "sim", "hf", "engine", "profiling", "generation", "serving", "tools", "commands",
)  # fmt: skip
"""Of `runtime`, from the bottom to the top; its `__init__` and `__main__` import what they like."""
PURE = ("policy", "sim")
"""Rooms of `runtime` that decide and compute, without tensors and threads."""
VENDOR_MODULES = ("torch.cuda", "torch.xpu", "torch.mps")
"""Modules that `runtime.accelerator` alone may name."""
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "torch.load"}


FOREIGN_LOADERS = ("benchmarks.peers.workers.with_airllm",)
"""Load with another library, which has no such argument."""


def top(module: str) -> str:
    return module.split(".")[0]


def room(module: str) -> str | None:
    """The room of `runtime` that a module is in; None outside of it and in its entry points."""
    package, *rest = module.split(".")
    return rest[0] if package == "runtime" and rest and rest[0] != "__main__" else None


def attributes(source: Source) -> set[str]:
    """Names with a dot in a module: `torch.load`, `torch.cuda.synchronize`."""
    return {ast.unparse(one) for one in ast.walk(source.tree) if isinstance(one, ast.Attribute)}


def loaded_with(module: str) -> dict[str, str]:
    """Everything that importing a module imports, each with the module of ours that does so."""
    ours = sources()
    seen, waiting, loaded = set(), [module], {}
    while waiting:
        # A module and the packages that it is in.
        for current in accumulate(waiting.pop().split("."), "{}.{}".format):
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
    offenders = []
    for source in sources("runtime").values():
        if here := room(source.module):
            assert here in ROOMS, f"{here} is no room"
            targets = {room(entry.module) for entry in source.imports if not entry.for_types}
            above = targets.intersection(ROOMS[ROOMS.index(here) + 1 :])
            offenders += [f"{here} imports {name}" for name in above]
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
            name = f"{entry.module}.{entry.name}"
            if top(name) in {*PACKAGES, "benchmarks"} and re.search(r"\._(?!_)", name):
                offenders.append(f"{source.path} imports {name}")
    assert not offenders


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
        used = attributes(source) | {top(entry.module) for entry in source.imports}
        offenders += [f"{source.path} uses {name}" for name in used & PICKLES]
    assert not offenders


def test_sources__name_no_kind_of_accelerator() -> None:
    """All others go through `runtime.accelerator`, so that each device works as CUDA does."""
    others = sources(*PACKAGES, "benchmarks")
    del others["runtime.accelerator"]
    offenders = []
    for source in others.values():
        used = attributes(source) | {f"{entry.module}.{entry.name}" for entry in source.imports}
        offenders += [f"{source.path} uses {one}" for one in used if one.startswith(VENDOR_MODULES)]
    assert not offenders


def test_models__are_never_loaded_with_code_of_their_own() -> None:
    """Without the argument, Transformers asks standard input whether to run that code."""
    assert not [
        f"{source.path}:{node.lineno}"
        for source in sources(*PACKAGES, "benchmarks").values()
        if source.module not in FOREIGN_LOADERS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and "trust_remote_code=False" not in map(ast.unparse, node.keywords)
    ]
